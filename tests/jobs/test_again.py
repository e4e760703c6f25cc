"""Cases that are done again: what a run's folder says of them, without SLURM."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from rich.console import Console

from minfer import ops
from minfer.jobs.run import CONFIG, Job, Run
from minfer.plan.config import UserError
from minfer.plan.shard import Shard
from minfer.rows import store
from minfer.run import control
from minfer.run.progress import RunProgress
from minfer.worker import resume
from tests.conftest import FAST

BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
def shard(tmp_path) -> Shard:
    """A shard whose one job, a process of this machine, is over and has left a row of each case."""
    op = ops.get("hgemm")
    cases = [op.case("torch", "float16", dict.fromkeys(op.axes, size)) for size in (16, 32, 48)]
    folder, results = tmp_path / "run", tmp_path / "results"
    shard = Shard("0000", "run", str(folder), str(results), "cpu", cases, FAST, 60.0, 60.0)
    shard.save()
    run = Run(folder)
    (folder / CONFIG).write_text(
        f"op: hgemm\ndtype: float16\nshape: {{name: x}}\ncluster: {{name: local}}\nresults: {results}\n"
    )
    run.add_jobs([Job("0000", "999999999", "local")])
    run.announce(["0000"])
    write(shard, 0, {case.key: status for case, status in zip(cases, ("ok", "timeout", "oom"), strict=True)})
    for case in cases:
        run.tell(["0000"], event="done", case=case.key)
    run.tell(["0000"], event="end")
    return shard


def write(shard: Shard, part: int, statuses: dict[str, str]) -> None:
    """Rows of cases with these statuses, in a file of their own; a later part's were finished later."""
    folder = Path(shard.results) / "a-cpu" / shard.run
    folder.mkdir(parents=True, exist_ok=True)
    at = BEGIN + datetime.timedelta(hours=part)
    rows = [
        {"run": shard.run, "case": case, "status": status, "finished": at, "device": "a CPU"}
        for case, status in statuses.items()
    ]
    store.write(store.to_table(rows), folder / f"0000-{part:03d}.parquet")


def kept(shard: Shard) -> list[tuple[str, str]]:
    """The cases that a job would not run again, with their statuses."""
    return [(row.case.key, row.status) for row in resume.find_written(shard)]


def test_chosen_statuses_are_missing_until_a_newer_row_is_there(shard):
    run = Run(Path(shard.folder))
    ok, timeout, oom = (case.key for case in shard.cases)
    progress = RunProgress(run)
    progress.read_once()
    assert progress.line() == "shards: 1 done; 3 of 3 rows" and not progress.missing
    control._redo(Console(quiet=True), progress, ["timeout", "crashed"])
    assert progress.missing == ["0000"] and progress.line() == "shards: 1 failed; 2 of 3 rows"
    shard = Shard.load(run.shards["0000"])
    assert kept(shard) == [(ok, "ok"), (oom, "oom")]

    write(shard, 1, {timeout: "timeout"})
    assert kept(shard) == [(ok, "ok"), (oom, "oom"), (timeout, "timeout")]  # once, and not for ever
    run.tell(["0000"], event="done", case=timeout)
    run.tell(["0000"], event="end")
    progress = RunProgress(run)
    progress.read_once()
    assert progress.line() == "shards: 1 done; 3 of 3 rows" and not progress.missing
    newest = run.rows(["status"])
    assert {key: row["finished"].hour for key, row in newest.items()} == {
        ("0000", ok): 0, ("0000", oom): 0, ("0000", timeout): 1,
    }  # fmt: skip

    control._redo(Console(quiet=True), progress, ["timeout"])
    assert kept(Shard.load(run.shards["0000"])) == [(ok, "ok"), (oom, "oom")]


def test_a_row_is_newer_than_those_before_it_also_where_a_clock_was_set_back(shard):
    """By an hour, while the run's later rows came."""
    case = shard.cases[1].key
    folder = Path(shard.results) / "a-cpu" / shard.run
    row = {
        "run": shard.run,
        "case": case,
        "status": "ok",
        "device": "a CPU",
        "finished": BEGIN - datetime.timedelta(hours=1),
    }
    store.write(store.to_table([row]), folder / "0000-001.parquet")
    assert Run(Path(shard.folder)).rows(["status"])["0000", case]["status"] == "ok"


def test_an_unknown_status_is_one_sentence_with_those_there_are(shard):
    with pytest.raises(
        UserError, match=r"^unknown status 'fast'; it can be ok, unconverged, wrong, .*, timeout, oom, or failed$"
    ):
        control.resubmit(Console(), Run(Path(shard.folder)), ["status=oom,fast"])


def test_claims_on_shards_are_no_progress_and_are_not_opened(shard, monkeypatch):
    """They have no line's end, so that they would be read anew at every look."""
    monkeypatch.setattr(
        "minfer.run.progress.POLLS_S", (0.0, 0.0)
    )  # a shard that is done is looked at as often as the queue
    progress = RunProgress(Run(Path(shard.folder)))
    (Path(shard.folder) / "progress" / "0000.process").write_text("process 1 on a node since 0")
    progress.read()
    opened = []
    monkeypatch.setattr("minfer.run.progress._new_events", lambda path, offsets: opened.append(path) or [])
    progress.read()
    assert not opened
    with open(Path(shard.folder) / "progress" / "0000.jsonl", "a") as file:
        file.write(json.dumps({"event": "end"}) + "\n")
    progress.read()
    assert [path.name for path in opened] == ["0000.jsonl"]
