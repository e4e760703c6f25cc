"""benchmarks/judge_honest.py in groups: each has processors of its own, and no row of theirs is lost or changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks import judge_honest


class Group:
    """Stands for a process that judges its part: writes a row for each case that it is given."""

    def __init__(self, command: list[str], preexec_fn: Any) -> None:
        given = dict(zip(command[3::2], command[4::2], strict=True))
        first, cases = int(given["--first"]), int(given["--cases"])
        processors = sorted(preexec_fn.args[1])
        rows = [
            {"case": str(i), "message": None if i % 2 else f"{i}", "on": processors}
            for i in range(first, first + cases)
        ]
        judge_honest.write(rows, Path(given["--to"]))

    def wait(self) -> None:
        pass


def test_groups_share_the_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Group)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3, 10)))
    monkeypatch.setattr(sys, "argv", ["judge_honest.py", "--groups", "3", "--cases", "11"])
    path = tmp_path / "judge-x.parquet"
    rows = judge_honest.run_groups(3, 11, path)
    assert [(row["case"], row["message"]) for row in rows] == [(str(i), None if i % 2 else f"{i}") for i in range(11)]
    assert [row["on"] for row in rows] == [[3, 4]] * 3 + [[5, 6]] * 4 + [[7, 8]] * 4
    assert not list(tmp_path.iterdir())
    judge_honest.write(rows, path)
    assert pq.read_table(path).to_pylist() == rows


def test_too_few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
    with pytest.raises(SystemExit, match="--groups 2 needs 4 processors, and this process may use 3"):
        judge_honest.pairs_of_processors(2)


@pytest.mark.parametrize("words", [["--resume"], ["--first", "3"]])
def test_groups_take_no_part_of_the_cases(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["judge_honest.py", "--groups", "2", *words])
    with pytest.raises(SystemExit):
        judge_honest.main()
    assert "--groups begins at the first case, in a new file" in capsys.readouterr().err
