"""The same matrix on every node: which nodes that are, and which of them is slow."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest
from rich.console import Console

from minfer.jobs import partition
from minfer.jobs.executors.slurm import Slurm
from minfer.jobs.run import Run
from minfer.plan.config import Cluster, Config, Container, Shape, UserError, check_values
from minfer.run import by_node
from tests.tables import row

SINFO = """\
gpu*|8|64000|gpu:l40s:2|infinite|n1|idle
gpu*|8|64000|gpu:a100:1|infinite|n2|mixed
gpu*|8|64000|gpu:l40s:2|infinite|n3|drained
gpu*|8|64000|gpu:l40s:2|infinite|n4|idle*
other|8|64000|(null)|infinite|n5|idle
"""


@pytest.fixture(autouse=True)
def slurm(monkeypatch) -> None:
    """sinfo's and scontrol's answers are played."""

    def run(command: list[str], **_: object) -> SimpleNamespace:
        return SimpleNamespace(returncode=0, stdout=SINFO if command[0] == "sinfo" else command[-1].replace(",", "\n"))

    monkeypatch.setattr(subprocess, "run", run)


def test_all_nodes_of_the_partition_that_fit_and_start_jobs_get_the_matrix():
    chosen, left_out = partition.distribute(Cluster("x", gres="gpu:l40s:1", distribute=True))
    assert chosen == ["n1"]
    assert left_out == [
        "n2 is left out: it does not have gpu:l40s:1",
        "n3 is left out: it is drained",
        "n4 is left out: it is idle (no answer)",
    ]
    assert partition.distribute(Cluster("x", distribute=["n2", "n1"])) == (["n2", "n1"], [])
    excluding = Cluster("x", distribute=["n1", "n2"], flags={"exclude": "n1"})
    assert partition.distribute(excluding) == (["n2"], ["n1 is left out: cluster.flags excludes it"])
    with pytest.raises(
        UserError, match=r"^the default partition has no node n5; cluster\.distribute takes true, or some of"
    ):
        partition.distribute(Cluster("x", distribute=["n1", "n5"]))
    with pytest.raises(UserError, match=r"^no node is left for cluster\.distribute: n3 is left out: it is drained$"):
        partition.distribute(Cluster("x", distribute=["n3"]))


@pytest.mark.parametrize(
    ("cluster", "more", "said"),
    [
        ({"distribute": "n1"}, {}, r"cluster\.distribute is 'n1'; it takes true, or a list of nodes such as"),
        ({"distribute": []}, {}, r"cluster\.distribute is \[\]; it takes true"),
        ({"distribute": True}, {"resume": True}, "resume=true skips a case that any node has finished"),
        (
            {"distribute": True, "flags": {"nodelist": "n1"}},
            {},
            r"cluster\.flags has nodelist, and cluster\.distribute",
        ),
    ],
)
def test_what_is_no_set_of_nodes_is_one_sentence(cluster, more, said):
    with pytest.raises(UserError, match=said):
        check_values(Config(op="hgemm", dtype="float16", shape=Shape("x"), cluster=Cluster("x", **cluster), **more))


def test_shards_of_a_node_share_its_job_and_are_in_no_array_with_other_nodes(tmp_path, monkeypatch):
    names = [f"{index:04d}" for index in range(5)]
    (tmp_path / "shards").mkdir()
    for name, node in zip(names, ["n1", "n1", "n1", "n2", "n2"], strict=True):
        (tmp_path / "shards" / f"{name}.json").write_text(json.dumps({"node": node}))
    monkeypatch.setattr("minfer.jobs.executors.slurm._largest_array", lambda: 1)
    asked = Slurm(Cluster("x", gres="gpu:2", distribute=True), Container())._group(Run(tmp_path), names, 0)
    arrays = [(where, [[path.stem for path in job] for job in jobs]) for _, where, jobs in asked]
    assert arrays == [("n1", [names[:2]]), ("n1", [names[2:3]]), ("n2", [names[3:]])]


def test_the_slow_node_is_the_first_and_nodes_with_other_devices_are_not_held_against_it():
    rows = [
        row("torch", us * factor, case, node=node, case=f"hgemm/torch/{case}")
        for node, factor in (("n1", 1.0), ("n2", 1.3), ("n3", 0.9))
        for case, us in (("a", 100.0), ("b", 10.0))
    ]
    rows += [row("torch", 500.0, "a", node="n4", device="NVIDIA A100", case="hgemm/torch/a")]
    rows += [row("torch", None, "c", node="n1", case="hgemm/torch/c", status="crashed", cold_us=None, steady_us=None)]
    found = by_node.compare(rows, ["n1", "n5"])
    assert [each.node for each in found] == ["n2", "n1", "n3", "n4", "n5"]
    assert [(each.cases, each.cold and round(each.cold, 6)) for each in found] == [
        (2, 1.3),
        (2, 1),
        (2, 0.9),
        (0, None),
        (0, None),
    ]
    assert found[0].worst == pytest.approx(1.3) and found[0].worst_case in ("hgemm/torch/a", "hgemm/torch/b")
    console = Console(record=True, width=160)
    console.print(by_node.tabulate("r1", found))
    text = console.export_text()
    assert "1.300" in text and "no rows" in text and text.index("n2") < text.index("n1 ")

    of = {(str(index), each["case"]): each for index, each in enumerate(rows)}
    shown = by_node.pick_median_rows(of)
    assert [(each["node"], each["case"]) for each in shown.values()] == [
        ("n1", "hgemm/torch/a"), ("n1", "hgemm/torch/b"), ("n4", "hgemm/torch/a"), ("n1", "hgemm/torch/c"),
    ]  # fmt: skip


def test_nodes_are_compared_by_the_judges_times_of_judged_rows():
    """The hints say that n1 is the slow one."""
    rows = [
        row("theirs", hint, case="hgemm/theirs/a", node=node, guarantee="judged, landlock", judged_us=us)
        for node, hint, us in (("n1", 300.0, 90.0), ("n2", 100.0, 100.0), ("n3", 100.0, 130.0))
    ]
    found = by_node.compare(rows)
    assert [(each.node, each.steady) for each in found] == [("n3", None), ("n2", None), ("n1", None)]
    assert found[0].cold == pytest.approx(1.3)
    (shown,) = by_node.pick_median_rows({(str(index), each["case"]): each for index, each in enumerate(rows)}).values()
    assert shown["node"] == "n2"
