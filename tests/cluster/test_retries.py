"""Jobs that end at a limit of theirs and are submitted again with more, on a real SLURM."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from minfer.jobs import executors
from minfer.jobs.run import Job, Run
from minfer.rows import store
from tests.cluster.conftest import LAB, until, words
from tests.conftest import launch

LASTS = """import time
from minfer import ops

def lasts(out, *inputs, **call):  # too long for a job of one minute, and not for one of four
    if not hasattr(lasts, "waited"):
        time.sleep(55)
        lasts.waited = True
    out.zero_()

ops.get("hgemm").torch("lasts", lasts)
"""


@pytest.fixture
def memory_counts(lab) -> Iterator[None]:
    """SLURM ends a job that takes more memory than it asked for, without cgroups."""
    conf = LAB / "etc" / "slurm.conf"
    text = conf.read_text()

    def reconfigure(text: str) -> None:
        conf.write_text(text)
        subprocess.run(["scontrol", "reconfigure"], check=True)
        until(lambda: executors.find_states(Run(LAB), [Job("", "0", "slurm")]) is not None, "slurmctld's answer")

    reconfigure(f"{text}JobAcctGatherParams=OverMemoryKill\nJobAcctGatherFrequency=1\n")
    yield
    reconfigure(text)


def asked(run) -> list[tuple[int, int | None, int | None]]:
    """How often the run's one shard was submitted again, and with what time and memory."""
    return [(job.retry, job.time_min, job.memory_gb) for job in Run(run).all_jobs]


def test_a_job_out_of_time_gets_more(lab, folder):
    extra = folder / "lasts.py"
    extra.write_text(LASTS)
    more = "kernel=lasts", f"extra=[{extra}]", "cluster.time_min=1", "cluster.grace_s=10", "cluster.retries=2"
    done = launch(*words(folder, *more), timeout=600)
    (run,) = (folder / "runs").iterdir()
    assert done.returncode == 4, done.stdout + done.stderr  # its result is wrong
    said = r"Note: shard 0000 reached its time limit of 1 min, and is submitted again with 2 min \(retry 1 of 2\)\."
    assert re.search(said, done.stdout), done.stdout
    assert "1 of 1 cases" in done.stdout and asked(run)[:2] == [(0, 1, 2), (1, 2, 2)]
    assert [row["kernel"] for row in store.rows(store.files(folder / "results"))] == ["lasts"]


def test_a_job_out_of_memory_gets_more(lab, folder, memory_counts):
    """Importing PyTorch takes more than the first job has."""
    done = launch(*words(folder, "kernel=torch", "cluster.memory_gb=1", "cluster.retries=3"), timeout=600)
    (run,) = (folder / "runs").iterdir()
    log = "\n".join(path.read_text() for path in run.glob("jobs/*.err"))
    assert done.returncode == 0, done.stdout + done.stderr + log
    assert "ran out of its 1 GB of memory, and is submitted again with 2 GB (retry 1 of 3)." in done.stdout, done.stdout
    assert asked(run)[:2] == [(0, 10, 1), (1, 10, 2)]
