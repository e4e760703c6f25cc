"""Many cases in many tasks, on a real SLURM; benchmarks/load.py does the same with 2,000 in 200."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.conftest import ROOT


def test_every_case_of_an_array_has_one_row_and_what_it_cost_is_said(folder):
    command = [sys.executable, ROOT / "benchmarks" / "load.py", "--cases", "40", "--tasks", "4", "--folder", folder]
    done = subprocess.run([*command, "--patience", "500"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases 40, tasks 4, rows 40: one a case" in done.stdout
    assert re.search(r"share of the nodes' time that was verifying and timing: [\d.]+ %", done.stdout)
