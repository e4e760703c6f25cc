"""What `minfer status` says of queue time, run time and memory, with and without SLURM's accounting."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from minfer import ops
from minfer.jobs import commands, queue
from minfer.jobs.run import Job, Run
from minfer.plan.shard import Shard
from minfer.run import usage
from minfer.run.progress import RunProgress
from tests.conftest import FAST

SACCT = """7_0|COMPLETED|1000|1030|65|
7_0.batch|COMPLETED|1030|1030|65|12468K
7_0.0|COMPLETED|1031|1031|64|1.5G
7_1|CANCELLED by 0|1000|Unknown|0|
7_2|PENDING|1000|Unknown|0|
8_[1-2,5%10]|CANCELLED by 0|1000|None|0|
"""


@pytest.fixture
def run(tmp_path) -> Run:
    """Two shards: the first was requeued once and is done, the second ended without a word."""
    op = ops.get("hgemm")
    case = op.case("torch", "float16", dict.fromkeys(op.axes, 16))
    for name in ("0000", "0001"):
        Shard(name, "run", str(tmp_path), str(tmp_path), "cpu", [case], FAST, 60.0, 60.0).save()
    run = Run(tmp_path)
    run.add_jobs([Job(f"000{n}", f"7_{n}", "slurm") for n in range(2)])
    (tmp_path / "progress").mkdir()
    first = [
        (100, "submitted"),
        (130, "start"),
        (150, "stopped"),
        (151, "end"),
        (200, "start"),
        (240, "done"),
        (250, "end"),
    ]
    second = [(100, "submitted"), (160, "start"), (175, "case")]
    for name, told in (("0000", first), ("0001", second)):
        about = {"case": case.key, "node": "n1", "message": "its time was over", "again": True, "rss_mb": 812.4}
        lines = [json.dumps({"time": time, "event": event} | about) + "\n" for time, event in told]
        (tmp_path / "progress" / f"{name}.jsonl").write_text("".join(lines))
    return run


def test_lines_of_sacct_are_one_a_job_with_the_most_memory_of_its_steps():
    found = queue.parse_accounts(SACCT.splitlines())
    assert found["7_0"] == queue.Account("COMPLETED", 30.0, 65.0, 1.5 * 2**30 / 1e6)
    assert found["7_1"] == queue.Account("CANCELLED") and found["7_2"] == queue.Account("PENDING")
    assert {job for job in found if job.startswith("8_")} == {
        "8_1",
        "8_2",
        "8_5",
    }  # an array of which no task had started


@pytest.mark.parametrize("accounting", [False, True])
def test_what_a_job_took_is_accounted_or_else_what_its_process_recorded(run, monkeypatch, accounting):
    told = {"squeue": "", "sacct": SACCT if accounting else None}
    monkeypatch.setattr(commands, "ask", lambda command, *words, **more: told[command])
    progress = RunProgress(run)
    progress.read_once()
    first, second = usage.collect(progress)
    recorded = usage.Usage("0000", "done", "7_0", "n1", 30.0, 71.0, 812.4, "worker")
    accounted = usage.Usage("0000", "done", "7_0", "n1", 30.0, 65.0, 1.5 * 2**30 / 1e6, "sacct")
    assert first == (accounted if accounting else recorded)
    assert second == usage.Usage(
        "0001", "cancelled" if accounting else "failed", "7_1", "n1", 60.0, 15.0, None, "worker"
    )
    assert usage.to_json([first])[0]["run_s"] == (65 if accounting else 71)


def test_few_shards_are_a_table_and_many_a_sentence():
    def made(n: int) -> list[usage.Usage]:
        return [usage.Usage(f"{i:04d}", "done", None, None, 10.0 * i, 60.0 + i, 900.0 + i, "worker") for i in range(n)]

    console = Console(record=True, width=120)
    console.print(usage.tabulate(made(2)))
    text = console.export_text()
    assert "0001" in text and "0:10" in text and "1:01" in text and "901 MB" in text
    assert usage.tabulate(made(401)) == (
        "queue time: median 33:20, at most 1:06:40 (shard 0400); run time: median 4:20, at most 7:40 (shard 0400); "
        "MaxRSS: median 1.1 GB, at most 1.3 GB (shard 0400)"
    )
