"""Jobs that fail on one node: how minfer reports them, and new jobs that leave the node out."""

from __future__ import annotations

from pathlib import Path

import pytest

from minfer import ops
from minfer.jobs import executors
from minfer.jobs.executors.slurm import Slurm
from minfer.jobs.logs import NODE
from minfer.jobs.run import Job, Run
from minfer.plan.config import Cluster, Config, Container, Shape, UserError, check_values
from minfer.plan.shard import Shard
from minfer.run import failures
from minfer.run.progress import RunProgress
from tests.conftest import FAST

BLACK_HOLE = 4  # shards whose jobs failed on n2 before they had reported anything


@pytest.fixture
def progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunProgress:
    """Six shards: four failed on n2, one failed on n1 after a case, one is done there."""
    case = ops.get("hgemm").case("torch", "float16", dict.fromkeys(ops.get("hgemm").axes, 16))
    names = [f"{index:04d}" for index in range(BLACK_HOLE + 2)]
    for name in names:
        Shard(name, "run", str(tmp_path), str(tmp_path), "cpu", [case], FAST, 60.0, 60.0).save()
    run = Run(tmp_path)
    run.announce(names)
    run.add_jobs([Job(name, f"7_{int(name)}", "slurm") for name in names])
    (tmp_path / "jobs").mkdir()
    for name in names[:BLACK_HOLE]:
        (tmp_path / "jobs" / f"7_{int(name)}_0_log.out").write_text(f"{NODE}n2\n")
        (tmp_path / "jobs" / f"7_{int(name)}_0_log.err").write_text("bash: module: command not found\n")
    for name in names[BLACK_HOLE:]:
        run.tell([name], event="start", node="n1")
        run.tell([name], event="done", case=case.key)
    run.tell(names[-1:], event="end")
    monkeypatch.setattr(Slurm, "states", lambda run, jobs: {})
    monkeypatch.setattr(executors, "find_ends", lambda jobs: {})
    progress = RunProgress(run)
    progress.read_once()
    return progress


def test_failures_are_told_by_node_and_cause_and_the_node_is_named(progress):
    assert progress.counts() == {"done": 1, "failed": 5}
    cause = (
        "its job ended early: bash: module: command not found; correct cluster.setup, or put the file on a file system"
    )
    many, one = failures.collect(progress)
    assert (many.node, many.shards) == ("n2", ("0000", "0001", "0002", "0003")) and many.cause.startswith(cause)
    assert (one.node, one.shards) == ("n1", ("0004",))
    told = failures.describe(many, progress.reasons())
    assert told.startswith(f"4 shards (0000, 0001, 0002, 0003) on n2 failed: {cause}") and told.endswith(
        "7_0_0_log.err."
    )
    assert failures.describe(one, progress.reasons()).startswith(
        "Shard 0004 on n1 failed: its job 7_4 ended early; see "
    )
    (warning,) = progress.warnings()
    assert warning.startswith("4 jobs failed on n2, and none got anything done there; leave it out with ")
    assert warning.endswith(f"resubmit {progress.run.folder} cluster.flags.exclude=n2")


def test_jobs_that_are_submitted_again_leave_the_node_out_where_that_is_asked_for(progress):
    def excluded(cluster: Cluster) -> object:
        return failures.avoid(progress, Slurm(cluster, Container())).cluster.flags.get("exclude")

    assert excluded(Cluster("x")) is None
    assert excluded(Cluster("x", avoid="auto")) == "n2"
    assert excluded(Cluster("x", avoid="auto", flags={"exclude": "n7"})) == "n7,n2"
    assert excluded(Cluster("x", avoid="auto", distribute=True)) is None
    with pytest.raises(UserError, match=r"^cluster\.avoid is 'n2'; it takes auto, and cluster\.flags\.exclude takes"):
        check_values(Config(op="hgemm", dtype="float16", shape=Shape("x"), cluster=Cluster("x", avoid="n2")))


def test_a_node_is_not_named_where_no_other_did_better_or_it_did_something(progress):
    for shard in progress.shards.values():
        shard.node = "n2"
    assert progress.find_bad_nodes() == {}
    for index, shard in enumerate(progress.shards.values()):
        shard.node, shard.state, shard.progressed = f"n{index % 2}", "failed", False
    assert progress.find_bad_nodes() == {}
