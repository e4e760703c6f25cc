"""`--part K/N`: the parts of the tests have each test once."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys

import pytest

from tests.conftest import ROOT, part_and_parts

FILES = ("tests/bench/test_stats.py", "tests/emulator/test_emulator.py")


def collected(*words: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--collect-only", *words, *FILES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_each_test_is_in_one_part() -> None:
    parts = [collected("--part", f"{part}/3") for part in (1, 2, 3)]
    assert all(parts) and sorted(itertools.chain(*parts)) == sorted(collected())


@pytest.mark.parametrize("word", ["0/3", "4/3", "3", "a/b", "1/0", "-1/3", ""])
def test_a_wrong_part_is_one_sentence(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=rf"takes K/N with K from 1 to N, such as 2/4, not {word!r}"):
        part_and_parts(word)


def test_a_part_is_two_numbers() -> None:
    assert part_and_parts("2/4") == (2, 4) and part_and_parts("1/1") == (1, 1)
