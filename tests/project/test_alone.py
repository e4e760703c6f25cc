"""Which tests run beside which others, with the hooks of tests/conftest.py and tests made here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

WATCHED = """
import time
from pathlib import Path
import pytest

{mark}
@pytest.mark.parametrize("number", range(2))
def test_it(number):
    with open(Path(__file__).parent / "log", "a") as log:
        print("{name} begins", file=log, flush=True)
        time.sleep(0.2)
        print("{name} ends", file=log, flush=True)
"""


def begin(folder: Path, shared: Path | None = None) -> subprocess.Popen[str]:
    """Start pytest with two workers on the tests in `folder`. `shared` becomes its MINFER_TESTS_SHARED."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    timing\n    gpu\n    slow\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "MINFER_TESTS_"))}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"MINFER_TESTS_SHARED": str(shared)} if shared else {})
    plugins = ["-p", "tests.conftest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-n", "2", str(folder)]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_those_that_measure_run_first_and_nothing_beside_them(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        mark = "@pytest.mark.timing" if name in "bd" else ""
        (tmp_path / f"test_{name}.py").write_text(WATCHED.format(name=name, mark=mark))
    run = begin(tmp_path)
    printed, _ = run.communicate()
    assert run.returncode == 0, printed
    told = (tmp_path / "log").read_text().splitlines()
    measured = [f"{name} {what}" for name in "bbdd" for what in ("begins", "ends")]
    assert told[: len(measured)] == measured
    assert sorted(told[len(measured) :]) == sorted(2 * ["a begins", "a ends", "c begins", "c ends"])


def test_two_runs_at_once_that_share_a_folder_both_end(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(WATCHED.format(name=name, mark=""))
        runs.append(begin(tmp_path / name, tmp_path))
    try:
        for run in runs:
            printed, _ = run.communicate(timeout=60)
            assert run.returncode == 0, printed
    finally:
        for run in runs:
            run.kill()
