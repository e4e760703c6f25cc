"""`minfer wait`, which follows a run from another shell, and a run as JUnit's XML."""

from __future__ import annotations

import datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from minfer import ops
from minfer.jobs import executors
from minfer.jobs.run import CONFIG, Job, Run
from minfer.plan.cases import Plan
from minfer.plan.config import UserError
from minfer.plan.shard import Shard
from minfer.rows import store
from minfer.run import control, start
from minfer.run.progress import RunProgress
from tests.conftest import FAST

QUIET = Console(quiet=True)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of three cases in one shard, whose job is a process that has ended."""
    monkeypatch.setattr("minfer.run.progress.POLLS_S", (0.0, 0.0))
    op = ops.get("hgemm")
    cases = [op.case("torch", "float16", dict.fromkeys(op.axes, size)) for size in (16, 32, 48)]
    folder, results = tmp_path / "run", tmp_path / "results"
    Shard("0000", "run", str(folder), str(results), "cpu", cases, FAST, 60.0, 60.0).save()
    run = Run(folder)
    (folder / CONFIG).write_text(
        f"op: hgemm\ndtype: float16\nshape: {{name: x}}\ncluster: {{name: local}}\nresults: {results}\n"
    )
    run.announce(["0000"])
    run.add_jobs([Job("0000", "999999999", "local")])
    return run


def write(run: Run, statuses: list[str]) -> None:
    """Write rows with these statuses for the first cases; the shard is done when all cases have one."""
    (shard,) = (Shard.load(path) for path in run.shards.values())
    rows = [
        {"run": run.name, "case": case.key, "op": "hgemm", "kernel": "torch", "dtype": "float16", "params": case.params,
         "shape": case.shape, "status": status, "message": "why", "device": "a CPU",
         "finished": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)}
        for case, status in zip(shard.cases, statuses, strict=False)
    ]  # fmt: skip
    store.write(store.to_table(rows), Path(shard.results) / "a-cpu" / run.name / "0000-000.parquet")
    for row in rows:
        run.tell(["0000"], event="done", case=row["case"])
    if len(rows) == len(shard.cases):
        run.tell(["0000"], event="end")


@pytest.mark.parametrize(
    ("statuses", "exit_status"),
    [(["ok", "unconverged", "unsupported"], 0), (["ok", "ok"], 1), (["ok", "crashed", "ok"], 4)],
)
def test_the_exit_status_tells_missing_from_failed(run, statuses, exit_status):
    (Path(run.request.results) / "a-cpu" / run.name).mkdir(parents=True)
    write(run, statuses)
    assert control.wait(QUIET, run, []) == exit_status
    executor = executors.choose(run.request.cluster, run.request.container)
    cases = RunProgress(run).cases
    assert (
        start.finish(QUIET, run, executor, Plan(cases, {}, {})) == exit_status
    )  # a launch, a race and resubmit end with it


def test_a_kernel_that_failed_in_another_run_fails_the_run_that_was_resumed(run):
    cases = RunProgress(run).cases
    for case, status in zip(cases, ("ok", "wrong", "unconverged"), strict=True):
        run.tell(["0000"], event="skip", case=case.key, status=status)
    run.tell(["0000"], event="end")
    assert control.wait(QUIET, run, []) == 4


def test_ctrl_c_ends_the_waiting_and_no_job(run, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "follow", interrupt)
    monkeypatch.setattr("minfer.jobs.executors.cancel", None)
    assert control.wait(QUIET, run, []) == 130
    with pytest.raises(UserError, match=r"^cannot read 'now'; usage: minfer wait RUN \[--junit=FILE\]$"):
        control.wait(QUIET, run, ["now"])


def test_a_run_as_junit_has_a_test_for_each_case(run, tmp_path):
    (Path(run.request.results) / "a-cpu" / run.name).mkdir(parents=True)
    write(run, ["ok", "wrong"])
    file = tmp_path / "junit.xml"
    assert control.wait(QUIET, run, [f"--junit={file}"]) == 1
    suite = ElementTree.parse(file).getroot()
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "3", "failures": "1", "errors": "1", "skipped": "0",
    }  # fmt: skip
    ok, wrong, missing = suite
    assert ok.get("classname") == "hgemm.torch" and len(ok) == 0
    assert wrong[0].tag == "failure" and wrong[0].get("message") == "wrong: why"
    assert missing[0].tag == "error" and missing[0].get("message", "").startswith(
        "no row: its job 999999999 ended early"
    )
    with pytest.raises(UserError, match=r"^cannot write /proc/x: .*; name another file with --junit="):
        control.status(QUIET, run, ["--junit=/proc/x"])


def test_whatever_failed_is_done_again_without_naming_statuses():
    assert set(control._parse_statuses("failed")) == {
        "wrong", "dishonest", "impossible", "compile_error", "error", "crashed", "timeout", "oom",
    }  # fmt: skip
    assert control._parse_statuses("ok,failed")[0] == "ok"
