"""A user's shell: environment variables for SLURM's commands, and a shell inside an allocation."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from minfer.jobs.run import Run
from minfer.rows import store
from minfer.run.progress import RunProgress
from tests.cluster.conftest import control, over, rows, submit

# Each changes what a command does. sbatch's own override what a job's script says.
THEIRS = {
    "SBATCH_PARTITION": "nowhere", "SBATCH_TIMELIMIT": "1", "SBATCH_NO_REQUEUE": "1", "SBATCH_MEM_PER_NODE": "100",
    "SBATCH_OUTPUT": "/dev/null", "SBATCH_JOB_NAME": "theirs", "SBATCH_EXPORT": "NONE", "SQUEUE_STATES": "suspended",
    "SQUEUE_PARTITION": "nowhere", "SQUEUE_ACCOUNT": "nobody", "SLURM_TIME_FORMAT": "relative",
}  # fmt: skip


def show(run) -> dict[str, str]:
    """What SLURM knows of a run's one job."""
    (job,) = Run(run).jobs.values()
    told = subprocess.run(["scontrol", "show", "job", job.id], capture_output=True, text=True, check=True).stdout
    return dict(word.split("=", 1) for word in told.split() if "=" in word)


@pytest.mark.fault("the user's environment has options for SLURM's commands (SBATCH_*, SQUEUE_*)")
def test_the_users_variables_change_no_job_and_hide_none(folder, monkeypatch, capsys):
    for name, value in THEIRS.items():
        monkeypatch.setenv(name, value)
    run = submit(folder, "kernel=torch", "cluster.flags.begin=now+600")
    said = capsys.readouterr().out
    assert said.count("of your environment are set aside") == 1 and all(name in said for name in THEIRS), said
    asked = show(run)
    assert asked["TimeLimit"] == "00:10:00" and asked["Requeue"] == "1" and asked["JobName"] == f"minfer-{run.name}"
    assert asked["MinMemoryNode"] == "2G" and asked["StdOut"].startswith(str(run))
    status = control("status", run)
    assert status.returncode == 0 and "1 queued (BeginTime; the first may start at 20" in status.stdout, status.stdout
    assert "1 jobs cancelled" in control("cancel", run).stdout


@pytest.mark.fault("a run is launched inside of an allocation (salloc, srun --pty)")
def test_inside_of_an_allocation_jobs_are_as_from_outside(folder, monkeypatch, capsys):
    """The allocation's memory limit is too low for Python, so a job that inherited it would fail."""
    allocation = ["salloc", "-Q", "-n1", "-c2", "--mem=50", "srun", "env", "-0"]
    told = subprocess.run(allocation, capture_output=True, text=True, check=True, timeout=60).stdout
    variables = dict(word.split("=", 1) for word in told.split("\0") if word.startswith("SLURM"))
    assert {"SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE"} <= variables.keys(), variables
    for name, value in (variables | {"SLURM_MEM_PER_CPU": "30"}).items():  # as with --mem-per-cpu
        monkeypatch.setenv(name, value)
    run = submit(folder, "kernel=torch")
    assert "Note: this shell is inside of SLURM's job" in capsys.readouterr().out
    assert over(run).line() == "shards: 1 done; 1 of 1 rows", RunProgress(Run(run)).reasons()
    (row,) = rows(folder)
    assert row["status"] in store.MEASURED
    assert row["job"] != os.environ["SLURM_JOB_ID"]


def test_another_user_sees_a_run_as_its_owner_does(lab):
    """A colleague has other jobs, so minfer must ask for the jobs of the run's owner."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        run = submit(Path(name), "kernel=torch", "cluster.flags.begin=now+600")
        try:
            for user in (0, 65534):
                os.setresuid(user, user, 0)
                progress = RunProgress(Run(run))
                progress.read_once()
                assert progress.counts() == {"queued": 1}, user
        finally:
            os.setresuid(0, 0, 0)
            control("cancel", run)
