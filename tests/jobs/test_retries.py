"""Which shards are submitted again with more, without SLURM: its answers are played."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import pytest

from minfer import ops
from minfer.jobs import executors, logs
from minfer.jobs.executors.slurm import Slurm
from minfer.jobs.queue import Account, Seen
from minfer.jobs.run import Job, Run
from minfer.plan.config import Cluster, Config, Container, Shape, UserError, check_values
from minfer.plan.shard import Shard
from minfer.run import retries
from minfer.run.progress import RunProgress
from tests.conftest import FAST

CLUSTER = Cluster("x", executor="slurm", time_min=10, memory_gb=48, retries=2)
TIME = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n"


class Played(Slurm):
    """SLURM has no job any longer, and no node has more than 64 GB."""

    @classmethod
    def states(cls, run: Run, jobs: Collection[Job]) -> dict[str, Seen]:
        return {}

    @classmethod
    def accounts(cls, jobs: Collection[Job]) -> dict[str, Account]:
        return {"7_3": Account("OUT_OF_MEMORY"), "7_4": Account("TIMEOUT")}

    def find_most(self) -> dict[str, float]:
        return {"time_min": math.inf, "memory_gb": 64}


def play(**asked: Any) -> Played:
    """The executor of jobs that ask for something else than CLUSTER."""
    return Played(dataclasses.replace(CLUSTER, **asked), Container())


PLAYED = play()


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    """Six shards whose jobs are over: out of time in order, killed for time, out of memory by the log and by accounting,
    stopped by somebody, and stopped in order before the time limit."""
    op = ops.get("hgemm")
    case = op.case("torch", "float16", dict.fromkeys(op.axes, 16))
    names = [f"{index:04d}" for index in range(6)]
    for name in names:
        Shard(name, "run", str(tmp_path), str(tmp_path), "cpu", [case], FAST, 60.0, 60.0).save()
    run = Run(tmp_path)
    run.announce(names)
    run.add_jobs([Job(name, f"7_{int(name)}", "slurm", 0, 10, 48) for name in names])
    for name, more in (("0000", {"limit": "time_min"}), ("0004", {}), ("0005", {"again": True})):
        run.tell([name], event="stopped", message="why", **more)
        run.tell([name], event="end")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "7_1_0_log.err").write_text(TIME)
    (tmp_path / "jobs" / "7_2_0_log.err").write_text(
        "slurmstepd-n1: error: StepId=7.0 exceeded memory limit (2 > 1), being killed\n"
    )
    monkeypatch.setitem(executors.EXECUTORS, "slurm", Played)
    return run


def read(run: Run) -> RunProgress:
    progress = RunProgress(run)
    progress.read_once()
    return progress


def asked(again: retries.Again) -> tuple[int, int | None, int | None]:
    return again.retry, again.executor.cluster.time_min, again.executor.cluster.memory_gb


def test_what_ended_at_a_limit_gets_twice_as_much_up_to_what_a_node_has(run):
    progress = read(run)
    assert len(progress.failed) == 6
    found = retries.plan_due(progress, progress.failed, PLAYED)
    assert {each.names: asked(each) for each in found} == {
        ("0005",): (0, 10, 48), ("0000", "0001"): (1, 20, 48), ("0002", "0003"): (1, 10, 64),
    }  # fmt: skip
    assert [each.why for each in found] == [
        "",
        "each of 2 shards (0000, 0001) reached its time limit of 10 min, and is submitted again with 20 min (retry 1 of 2)",
        "each of 2 shards (0002, 0003) ran out of its 48 GB of memory, and is submitted again with 64 GB (retry 1 of 2)",
    ]
    assert [each.names for each in retries.plan_due(progress, progress.failed, play(retries=0))] == [("0005",)]


def test_retries_come_to_an_end_and_a_job_keeps_what_it_was_given(run):
    run.add_jobs([Job("0000", "7_0", "slurm", 1, 20, 48), Job("0001", "7_1", "slurm", 2, 40, 48)])
    run.add_jobs([Job("0002", "7_2", "slurm", 1, 10, 64)])  # no node has more
    found = {each.names: each for each in retries.plan(read(run), ["0000", "0001", "0002", "0004"], PLAYED)}
    assert {names: asked(each) for names, each in found.items()} == {
        ("0000",): (2, 40, 48), ("0001",): (2, 40, 48), ("0002",): (1, 10, 64), ("0004",): (0, 10, 48),
    }  # fmt: skip
    assert [bool(each.why) for each in found.values()] == [True, False, False, False]


def test_a_limit_that_is_left_to_the_site_is_not_doubled(run):
    unset = play(memory_gb=None)
    assert {each.names for each in retries.plan_due(read(run), ["0000", "0002"], unset)} == {("0000",)}


def test_retries_need_something_to_double():
    for cluster, said in (
        (Cluster("x", retries=-1), r"cluster\.retries is -1; it takes a number from 0"),
        (
            Cluster("x", retries=1),
            r"cluster\.retries doubles cluster\.time_min and cluster\.memory_gb, and neither is set; set one",
        ),
    ):
        with pytest.raises(UserError, match=said):
            check_values(Config(op="hgemm", dtype="float16", shape=Shape("x"), cluster=cluster))


def test_a_process_that_the_warning_itself_ended_was_out_of_time(tmp_path):
    log = tmp_path / "log"
    log.write_text("srun: error: n1: task 0: User defined signal 2\n")
    assert logs.find_limit(log) == "time_min"
    log.write_text("User defined signal 2\nsrun: error: n1: task 0: Killed\n")
    assert logs.find_limit(log) is None and logs.find_limit(tmp_path / "none") is None
