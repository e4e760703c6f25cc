"""What breaks under a job, on a real SLURM. After each: no finished row is lost, no case has two, and what is not done
is done by SLURM, by a resubmission, or reported with its reason."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from minfer.jobs import executors
from minfer.jobs.run import Job, Run
from minfer.process.threads import children
from minfer.run.progress import RunProgress
from tests.cluster.conftest import LAB, at, lab_node, node_of, over, resubmit, rows, submit, until

SLOW = "kernel=[honest,slow,zeros]"  # a case before, a case that lasts, and a case after


def supervisor(run: Path) -> int:
    """The process of the run's one shard, which is on this machine as all nodes of our cluster are."""
    return int((run / "progress" / "0000.process").read_text().split()[1])


@pytest.mark.fault("kill -9 of a job's Python in mid-case")
def test_job_killed_in_mid_case_is_resubmitted(lab, folder):
    run = submit(folder, SLOW)
    at(run, "slow")
    os.kill(supervisor(run), signal.SIGKILL)
    progress = over(run)
    assert progress.line().startswith("shards: 1 failed; 1 of 3 rows")
    assert re.search(r"its job \S+ ended early as FAILED; see .*log\.err", progress.reasons()["0000"])
    assert [row["kernel"] for row in rows(folder)] == ["honest"]
    resubmit(run)
    assert over(run).line() == "shards: 1 done; 3 of 3 rows"
    assert {row["kernel"] for row in rows(folder)} == {"honest", "slow", "zeros"}


@pytest.mark.fault("kill -9 of the process that runs kernels")
def test_a_shard_whose_child_is_killed_has_a_row_that_says_so_and_goes_on(lab, folder):
    run = submit(folder, SLOW)
    at(run, "slow")
    (child,) = [pid for pid in children(supervisor(run)) if Path(f"/proc/{pid}/comm").read_text() == "minfer.child\n"]
    os.kill(child, signal.SIGKILL)
    assert over(run).line() == "shards: 1 done; 3 of 3 rows"
    found = {row["kernel"]: row for row in rows(folder)}
    assert found["slow"]["status"] == "crashed" and "SIGKILL" in found["slow"]["message"]
    assert found["zeros"]["status"] == "wrong"


@pytest.mark.fault("a node crashes in mid-job")
def test_node_crash_runs_the_job_again_on_another_node(lab, folder):
    run = submit(folder, SLOW)
    at(run, "slow")
    name = node_of(run)
    lab_node("crash", name)
    try:
        progress = RunProgress(Run(run))
        seen = set()

        def finished() -> bool:
            progress.read()
            seen.add(progress.shards["0000"].state)
            return not progress.active

        until(finished, "the end of the job")
    finally:
        lab_node("start", name)
    assert progress.line() == "shards: 1 done; 3 of 3 rows" and "requeued" in seen
    assert over(run).shards["0000"].started == 2
    assert {row["kernel"] for row in rows(folder)} == {"honest", "slow", "zeros"}


@pytest.mark.fault("the time limit is reached")
def test_before_its_time_limit_a_job_stops_after_a_case_and_is_queued_again(lab, folder):
    """And a case that never ends is abandoned, twice, after which the job is not queued again."""
    run = submit(folder, "kernel=[slow,hangs]", "cluster.time_min=2", "cluster.grace_s=20", "case_timeout_s=900")
    progress = over(run)
    assert progress.line().startswith("shards: 1 failed; 1 of 2 rows"), progress.line()
    assert progress.shards["0000"].started == 2
    assert "its time was over before one case was finished; raise cluster.time_min" in progress.reasons()["0000"]
    assert [row["kernel"] for row in rows(folder)] == ["slow"]


@pytest.mark.fault("scontrol requeue")
def test_scontrol_requeue_runs_the_rest(lab, folder):
    run = submit(folder, SLOW)
    at(run, "slow")
    (job,) = Run(run).jobs.values()
    subprocess.run(["scontrol", "requeue", job.id], check=True)
    progress = over(run)
    assert progress.line() == "shards: 1 done; 3 of 3 rows" and progress.shards["0000"].started == 2
    assert len(rows(folder)) == 3


@pytest.mark.fault("slurmctld restarts in mid-run, and one array task is cancelled")
def test_slurmctld_restarts_in_mid_run_and_one_task_is_cancelled(lab, folder):
    run = submit(folder, "kernel=[slow,hangs]", "cluster.max_jobs=2", "case_timeout_s=900")
    at(run, "hangs")
    lab_node("crash", "slurmctld")
    try:
        progress = RunProgress(Run(run))
        until(lambda: progress.read() and not progress.answers, "that SLURM does not answer")
        assert "SLURM does not answer" in progress.line() and progress.active
    finally:
        lab_node("start", "slurmctld")
    jobs = Run(run).jobs
    hanging = next(name for name, path in Run(run).shards.items() if "hangs" in path.read_text())
    until(lambda: executors.find_states(Run(run), list(jobs.values())) is not None, "slurmctld's return")
    subprocess.run(["scancel", jobs[hanging].id], check=True)
    progress = over(run)
    assert progress.line().startswith("shards: 1 done, 1 cancelled; 1 of 2 rows")
    assert progress.reasons() == {hanging: f"its job {jobs[hanging].id} was cancelled"} and progress.missing == [
        hanging
    ]
    assert [row["kernel"] for row in rows(folder)] == ["slow"]


def test_more_shards_than_an_array_holds_become_several_arrays(lab, folder):
    conf = LAB / "etc" / "slurm.conf"
    text = conf.read_text()

    def restart(text: str) -> None:
        conf.write_text(text)
        lab_node("crash", "slurmctld")
        lab_node("start", "slurmctld")
        until(lambda: executors.find_states(Run(folder), [Job("", "0", "slurm")]) is not None, "slurmctld's return")

    try:
        restart(re.sub("MaxArraySize=.*", "MaxArraySize=3", text))
        run = submit(folder, "kernel=[zeros,raises,honest]", "dtype=[float16,bfloat16]", "cluster.max_jobs=6")
        arrays = [job.id.partition("_")[0] for job in Run(run).jobs.values()]
        assert [arrays.count(array) for array in dict.fromkeys(arrays)] == [3, 3]
        assert over(run).line() == "shards: 6 done; 6 of 6 rows"
        # A job whose end slurmctld misses is run again, and finds nothing to do: minutes for the tests after this one.
        until(lambda: executors.find_states(Run(run), Run(run).jobs.values()) == {}, "the end of the jobs")
        assert {row["job"] for row in rows(folder)} == {job.id for job in Run(run).jobs.values()}
    finally:
        restart(text)


@pytest.mark.fault("two runs at once into one results folder")
def test_two_runs_at_once_into_one_results_folder(lab, folder):
    runs = [submit(folder, "kernel=[honest,zeros]") for _ in range(2)]
    for run in runs:
        assert over(run).line() == "shards: 1 done; 2 of 2 rows"
    files = sorted((folder / "results").glob("*/*/*.parquet"))
    assert {path.parent.name for path in files} == {run.name for run in runs}
    assert len(rows(folder)) == 4
