"""How minfer reacts to what SLURM says about jobs: reservations that end, arrays that are cancelled, lost lines in a run's
folder, commands that fail."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from minfer.jobs.run import JOBS, Run
from minfer.plan.config import NoAnswer, UserError
from minfer.run.progress import RunProgress
from tests.cluster.conftest import control, lab_node, submit, tmpfs, until

LATER = "cluster.flags.begin=now+900"


def scontrol(*words: str) -> None:
    subprocess.run(["scontrol", *words], check=True, capture_output=True, timeout=60)


def read(run: Path) -> RunProgress:
    progress = RunProgress(Run(run))
    progress.read_once()
    return progress


@pytest.mark.fault("the reservation that jobs wait for ends")
def test_a_reservation_that_ends_is_named(lab, folder):
    scontrol(
        "create", "reservation", "reservationname=short", "starttime=now", "duration=1", "nodes=node3", "users=root"
    )
    run = submit(folder, "kernel=torch", "cluster.flags={reservation: short, hold: true}")
    scontrol("update", "reservationname=short", "endtime=now+1")
    until(lambda: "RESV_DEL_HOLD" in read(run).line(), "the end of the reservation")
    status = control("status", run)
    assert "1 queued (RESV_DEL_HOLD: Reservation short was deleted)" in status.stdout, status.stdout
    assert (
        "Note: 1 jobs wait as RESV_DEL_HOLD: Reservation short was deleted: its reservation has ended;" in status.stdout
    )
    assert "1 jobs cancelled" in control("cancel", run).stdout


@pytest.mark.fault("jobs that never started are cancelled with scancel")
def test_an_array_that_never_started_and_is_cancelled_reads_cancelled(folder):
    run = submit(folder, "kernel=[torch,honest]", "cluster.max_jobs=2", LATER)
    array = Run(run).all_jobs[0].id.partition("_")[0]
    time.sleep(2)  # SLURM's accounting hears of a job with a delay
    subprocess.run(["scancel", array], check=True)
    until(lambda: read(run).counts() == {"cancelled": 2}, "that both shards are cancelled")
    assert read(run).reasons() == {f"000{n}": f"its job {array}_{n} was cancelled" for n in range(2)}


@pytest.mark.fault("runs/ is full right after sbatch has queued the jobs")
def test_jobs_whose_ids_cannot_be_written_are_found_by_the_runs_name(lab, folder, monkeypatch):
    with tmpfs(folder / "runs", "80m") as runs:
        real, stub = shutil.which("sbatch"), folder / "bin" / "sbatch"
        stub.parent.mkdir()
        stub.write_text(f'#!/bin/sh\n{real} "$@"\ncat /dev/zero > {runs}/filler 2>/dev/null\nexit 0\n')
        stub.chmod(stub.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
        with pytest.raises(
            UserError, match=r"^1 jobs are queued as \S+, and their ids cannot be written to .* No space left"
        ):
            submit(folder, "kernel=torch", LATER)
        monkeypatch.undo()
        (run,) = (path for path in runs.iterdir() if path.is_dir())
        assert not (run / JOBS).exists() or not (run / JOBS).read_text()
        status = control("status", run)
        assert status.returncode == 0 and "shards: 1 queued (BeginTime" in status.stdout, status.stdout + status.stderr
        assert "Note: 1 jobs of the run are in the queue, and its folder does not name them: " in status.stdout
        assert "nothing to submit" in control("resubmit", run).stdout
        assert "1 jobs cancelled" in control("cancel", run).stdout
        until(lambda: read(run).counts() == {"cancelled": 1}, "the end of the job")


def test_a_full_disk_at_launch_is_one_sentence(lab, folder):
    with tmpfs(folder / "runs", "500k") as runs:
        with pytest.raises(
            UserError, match=r"^cannot copy the sources to .*: No space left on device; free space there"
        ):
            submit(folder, "kernel=torch", LATER)
        assert not list(runs.iterdir())


@pytest.mark.fault("SLURM does not answer")
def test_a_controller_that_does_not_answer_is_said_within_seconds(lab, folder):
    run = submit(folder, "kernel=torch", LATER)
    lab_node("crash", "slurmctld")
    try:
        begin = time.monotonic()
        status = control("status", run, "--json")
        assert time.monotonic() - begin < 60
        assert status.returncode == 3 and json.loads(status.stdout)["slurm"] == "no answer", status.stderr
        with pytest.raises(NoAnswer, match=r"^SLURM does not answer: "):
            submit(folder, "kernel=torch")
        assert list((folder / "runs").iterdir()) == [run]
        done = control("cancel", run)
        assert done.returncode == 3 and done.stderr.startswith("minfer: SLURM does not answer"), done.stderr
    finally:
        lab_node("start", "slurmctld")
    until(lambda: "1 jobs cancelled" in control("cancel", run).stdout, "the end of the job")
