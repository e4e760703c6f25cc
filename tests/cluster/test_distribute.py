"""The same matrix on every node of a real SLURM, and what its jobs took."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from minfer.jobs import partition
from minfer.jobs.run import Run
from minfer.plan.config import UserError
from minfer.rows import store
from tests.cluster.conftest import PATIENCE_S, control, over, submit, until, words
from tests.conftest import launch

LAME = """import os, time
from minfer import ops

def lame(out, a, b, alpha=1.0, beta=0.0):
    if os.environ["SLURMD_NODENAME"] == "node2":
        time.sleep(0.2)
    ops.get("hgemm").kernels["torch"].function(out, a, b, alpha, beta)

ops.get("hgemm").torch("lame", lame)
"""


def test_every_node_runs_the_matrix_and_the_slow_one_is_found(lab, folder, tmp_path, monkeypatch):
    """A kernel waits on one of three nodes. What the jobs took is said with SLURM's accounting and without."""
    extra = folder / "lame.py"
    extra.write_text(LAME)
    run = submit(folder, "kernel=lame", f"extra=[{extra}]", "cluster.distribute=true", "cluster.max_jobs=2")
    assert len({job.id for job in Run(run).jobs.values()}) == 3
    assert over(run).line() == "shards: 3 done; 3 of 3 rows"
    found = list(store.rows(store.files(folder / "results")))
    assert sorted(row["node"] for row in found) == ["node1", "node2", "node3"]
    assert len({row["case"] for row in found}) == 1

    told = control("status", run)
    assert told.returncode == 0 and "3 of 3 cases" in told.stdout, told.stdout + told.stderr
    table = told.stdout.partition("each node's time over the median of the nodes")[2].partition("Jobs")[0]
    lines = [line.split() for line in table.splitlines() if "node" in line and "hgemm/lame" in line]
    assert [line for line in lines if "node2" in line] == lines[:1], table  # the slowest is the first
    known = json.loads(control("status", run, "--json").stdout)
    assert known["nodes"][0]["node"] == "node2" and known["nodes"][0]["cold"] > 1.5

    for source, of in (("sacct", known), ("worker", None)):
        if of is None:
            stub = tmp_path / "bin" / "sacct"
            stub.parent.mkdir()
            stub.write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
            stub.chmod(0o755)
            monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
            of = json.loads(control("status", run, "--json").stdout)
        for shard in of["usage"]:
            assert shard["source"] == source and shard["state"] == "done", shard
            assert shard["run_s"] > 0 and shard["queue_s"] >= 0 and shard["max_rss_mb"] > 50, shard


def test_nodes_are_named_and_those_that_cannot_take_part_are_told(lab, folder):
    subprocess.run(["scontrol", "update", "nodename=node3", "state=drain", "reason=test"], check=True)
    try:
        done = launch(*words(folder, "kernel=torch", "cluster.distribute=true", "dry_run=true"))
        assert done.returncode == 0, done.stderr
        assert "Note: node3 is left out: it is drain" in done.stdout
        assert "The same cases on each of 2 nodes: node1, node2." in done.stdout
    finally:
        subprocess.run(["scontrol", "update", "nodename=node3", "state=resume"], check=True)
    until(
        lambda: any(node.name == "node3" and node.state == "idle" for node in partition.list_nodes(None)),
        "node3's answer",
    )
    with pytest.raises(
        UserError, match=r"^the default partition has no node node9; cluster\.distribute takes true, or"
    ):
        submit(folder, "kernel=torch", "cluster.distribute=[node1,node9]")
    with pytest.raises(
        UserError, match=r"^no node is left for cluster\.distribute: node2 is left out: it does not have"
    ):
        submit(
            folder,
            "kernel=torch",
            "cluster.distribute=[node2]",
            "cluster.gres=gpu:l40s:1",
            "device=cuda",
            "shape=squares",
        )
    run = submit(folder, "kernel=torch", "cluster.distribute=['node[2-3]']", "+cluster.flags.hold=true")
    ids = ",".join(job.id for job in Run(run).jobs.values())
    told = subprocess.run(["squeue", "-h", "-j", ids, "-O", "ReqNodes:20"], capture_output=True, text=True)
    assert sorted(told.stdout.split()) == ["node2", "node3"]
    control("cancel", run)


def test_one_launch_runs_the_matrix_on_each_model_of_gpu(lab, folder):
    """As docs/cluster.md says it: a run for each model, whose job gets a node that has one."""
    asked = [word for word in words(folder, "kernel=torch") if word not in ("cluster.gres=null", "device=cpu")]
    both = ("device=cuda", "cluster.gres=gpu:l40s:1,gpu:a100:1", "wait=false")
    done = launch("--multirun", *asked, *both, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted(path for path in (folder / "runs").iterdir() if path.is_dir())
    assert len(runs) == 2 and all(run.name in done.stdout for run in runs), done.stdout
    nodes = {}
    for run in runs:
        over(run)  # with no row: the GPUs of this cluster are make-believe
        (job,) = Run(run).all_jobs
        told = subprocess.run(["scontrol", "show", "job", job.id], capture_output=True, text=True, check=True).stdout
        fields = dict(word.split("=", 1) for word in told.split() if "=" in word)
        nodes[fields["TresPerNode"].removeprefix("gres/").removeprefix("gres:")] = fields["NodeList"]
    assert nodes.keys() == {"gpu:l40s:1", "gpu:a100:1"}
    assert nodes["gpu:l40s:1"] in ("node1", "node3") and nodes["gpu:a100:1"] == "node2"
