"""Many cases in many tasks, on a real SLURM; benchmarks/load.py does the same with 2,000 in 200."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.load import request
from tests.cluster.conftest import control, until
from tests.conftest import ROOT

# Python imports this module by itself at its start: it writes down how often files of the runs have been opened, and how often
# a folder of theirs has been listed.
COUNTER = """import os, sys, threading, time
counts = {"open": 0, "os.scandir": 0}

def count(event, arguments):
    if event in counts and str(arguments[0]).startswith(os.environ["MINFER_TEST_RUNS"]):
        counts[event] += 1

def tell():
    descriptor = os.open(os.environ["MINFER_TEST_OPENED"], os.O_WRONLY | os.O_CREAT)
    while True:
        os.pwrite(descriptor, "{} {} {}".format(*counts.values(), time.monotonic()).encode(), 0)
        time.sleep(0.2)

sys.addaudithook(count)
threading.Thread(target=tell, daemon=True).start()
"""


def test_every_case_of_an_array_has_one_row_and_what_it_cost_is_said(folder):
    command = [sys.executable, ROOT / "benchmarks" / "load.py", "--cases", "40", "--tasks", "4", "--folder", folder]
    done = subprocess.run([*command, "--patience", "500"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases 40, tasks 4, rows 40: one a case" in done.stdout
    assert re.search(r"share of the nodes' time that was verifying and timing: [\d.]+ %", done.stdout)


def test_a_launcher_that_waits_for_many_shards_leaves_the_file_system_alone(folder, tmp_path):
    """400 held shards. A launcher that opened a file of each at every look opened 1.8 files a shard and second."""
    shards = 400
    (tmp_path / "sitecustomize.py").write_text(COUNTER)
    told = tmp_path / "opened"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "MINFER_TEST_OPENED": str(told)}
    environment["MINFER_TEST_RUNS"] = str(folder / "runs")
    words = request(folder, shards, shards, ["+cluster.flags.hold=true", "wait=true"])
    command = [sys.executable, "-m", "minfer.launch", *(word for word in words if word != "wait=false")]
    with open(tmp_path / "said", "w") as said:
        launcher = subprocess.Popen(command, stdout=said, stderr=said, cwd=ROOT, env=environment)
    try:
        until(lambda: launcher.poll() is not None or "JobHeldUser" in (tmp_path / "said").read_text(), "the hold")
        assert launcher.poll() is None, (tmp_path / "said").read_text()
        until(lambda: rests(told), "that it has read all shards once, and opens nothing for a second")
        before, _ = told.read_text().split(), time.sleep(20)
        opened, listed, seconds = (float(b) - float(a) for a, b in zip(before, told.read_text().split(), strict=True))
    finally:
        launcher.kill()
        launcher.wait()
    (run,) = (folder / "runs").iterdir()
    assert f"{shards} jobs cancelled" in control("cancel", run).stdout
    assert seconds > 10 and listed > 0  # it looked
    assert opened / seconds < shards / 20


def rests(told: Path) -> bool:
    """Whether no file is opened for a second."""
    before, _ = told.read_text().split()[0], time.sleep(1)
    return told.read_text().split()[0] == before
