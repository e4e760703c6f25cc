"""What is shown while jobs run: rows as they come on a terminal, a line now and then in a log."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minfer import ops
from minfer.jobs import executors
from minfer.jobs.executors import local
from minfer.jobs.run import CONFIG, Job, Run
from minfer.ops import Case
from minfer.plan.cases import Plan
from minfer.plan.config import Cluster, Container
from minfer.plan.shard import Shard
from minfer.rows import store
from minfer.run import live, start
from minfer.run.live import Board, Key, follow
from minfer.run.progress import RunProgress
from tests.conftest import FAST
from tests.tables import row

HGEMM = ops.get("hgemm")
KERNELS = ("torch", "cpu_naive", "cpu_blocked")
CASES = [HGEMM.case(name, "float16", dict.fromkeys("mnk", size)) for size in (64, 32) for name in KERNELS]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of two problems with three kernels each, in one shard, whose job has ended."""
    monkeypatch.setattr("minfer.run.progress.POLLS_S", (0.0, 0.0))
    folder, results = tmp_path / "run", tmp_path / "results"
    Shard("0000", "run", str(folder), str(results), "cpu", CASES, FAST, 60.0, 60.0).save()
    run = Run(folder)
    shape = "shape: {name: x}\ncluster: {name: local}"
    (folder / CONFIG).write_text(f"op: hgemm\ndtype: float16\n{shape}\nresults: {results}\n")
    run.announce(["0000"])
    run.add_jobs([Job("0000", "999999999", "local")])
    return run


def done(case: Case, us: float = 100.0, status: str = "ok", **told: Any) -> dict[str, Any]:
    """The event of a finished case, as a shard tells it."""
    speedup = {"cold_speedup": 50 / us, "cold_speedup_low": 49 / us, "cold_speedup_high": 51 / us}
    figures = {
        "baseline": "torch",
        "metric": "TFLOP/s",
        "cold_us": us,
        "cold_rate": 0.5,
        "cold_verdict": "slower",
    } | speedup
    return {"event": "done", "case": case.key, "status": status, "row": (figures if status == "ok" else {}) | told}


def test_a_board_says_what_is_done_and_which_kernel_is_the_best_so_far(run: Run) -> None:
    board = Board(RunProgress(run))
    doing = []
    for event in (
        {"event": "building"},
        {"event": "build", "kernel": "cpu_naive", "number": 14, "of": 27},
        {"event": "built"},
        {"event": "waiting", "gpu": "GPU-1"},
        {"event": "case", "case": CASES[1].key},
        {"event": "profiler", "profiler": "ncu", "cases": 3},
    ):
        assert board.take(event) is None
        doing.append(board.doing)
    assert doing[1] == "compiling 14 of 27 kernels (cpu_naive)"
    assert doing[3] == "waiting: another run uses the GPU"
    assert doing[4] == "running hgemm cpu_naive float16 TN float32 64x64x64" and doing[5] == "profiling: ncu"
    group = CASES[0].op, CASES[0].problem
    assert board.take(done(CASES[0], 50)) is None and board.describe_best(group) == ""  # the baseline itself
    assert board.take(done(CASES[1], status="wrong")) is None and board.describe_best(group) == ""
    assert board.take(done(CASES[2], 40)) == group
    assert board.describe_best(group) == "cpu_blocked with 40.0 µs, 0.5 TFLOP/s, 125.0 ± 2.5 % of torch"
    tie = done(CASES[5], 49, cold_verdict="tie")
    assert board.take(tie) is None
    assert board.describe_best((CASES[5].op, CASES[5].problem)).endswith("102.0 ± 2.0 % of torch, a tie")
    said = board.describe_group(group)
    assert said.startswith("hgemm float16 TN float32 64x64x64: 3 rows; the best is cpu_blocked with 40.0 µs")
    assert [(each.case.kernel, each.status) for each in board.rows] == [
        ("torch", "ok"), ("cpu_naive", "wrong"), ("cpu_blocked", "ok"), ("cpu_blocked", "ok")
    ]  # fmt: skip


def test_the_line_of_a_problem_with_one_case_has_one_row(run: Run) -> None:
    shard = Shard(
        "0000", "run", str(run.folder), str(run.folder.parent / "results"), "cpu", CASES[:1], FAST, 60.0, 60.0
    )
    shard.save()
    board = Board(RunProgress(run))
    group = board.take(done(CASES[0]))
    assert group and board.describe_group(group) == "hgemm float16 TN float32 64x64x64: 1 row"


def test_a_row_of_the_first_pass_is_shown_until_the_next_replaces_it(run: Run) -> None:
    progress = RunProgress(run)
    board, shard = Board(progress), progress.shards["0000"]
    group = CASES[0].op, CASES[0].problem

    def take(event: dict[str, Any]) -> Key | None:
        shard.take(event)
        return board.take(event)

    look = lambda case, us: done(case, us) | {"event": "first"}
    assert take(look(CASES[0], 50)) is None and take(look(CASES[1], 45)) is None
    assert take(done(CASES[2], status="crashed")) == group  # each of its cases has a row now, of one pass or the other
    assert board.describe_group(group).startswith(
        "hgemm float16 TN float32 64x64x64: 3 rows, some with cold times only; the best is cpu_naive with 45.0 µs"
    )
    assert (progress.rows, progress.first) == (1, 2) and "1 of 6 rows, 2 more with cold times only" in progress.line()
    assert take(done(CASES[0], 50)) is None and take(done(CASES[1], 48)) == group
    assert board.describe_best(group).startswith("cpu_naive with 48.0 µs")
    assert [each.case for each in board.rows] == [CASES[2], CASES[0], CASES[1]]
    assert (progress.rows, progress.first) == (3, 0) and progress.line().endswith("3 of 6 rows")


@pytest.mark.parametrize("height", [0, 2, 99])
def test_a_table_has_the_last_rows_that_fit(run: Run, height: int) -> None:
    board = Board(RunProgress(run))
    for case in CASES:
        board.take(done(case))
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(board.tabulate(height))
    shown = [line.split()[1] for line in console.export_text().splitlines() if line.strip().startswith("hgemm ")]
    assert shown == [case.kernel for case in CASES][-max(1, height) :]


def tell(run: Run, events: list[dict[str, Any]]) -> None:
    for event in events:
        run.tell(["0000"], **event)


def test_on_a_terminal_rows_are_shown_as_they_come_and_taken_away_at_the_end(run: Run) -> None:
    tell(run, [{"event": "start", "node": "n"}, *map(done, CASES), {"event": "end"}])
    screen = io.StringIO()
    follow(Console(file=screen, force_terminal=True, width=120, height=30), RunProgress(run))
    shown = screen.getvalue()
    assert "cpu_blocked" in shown and "6/6" in shown and "best so far at hgemm float16 TN float32 32x32x32" in shown
    assert shown.endswith(("\x1b[2K", "\x1b[?25h")) or "\x1b[2K" in shown[-200:]


def test_in_a_log_a_problem_has_a_line_when_its_rows_are_there_and_progress_one_a_minute(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten looks, a second apart: at most one line in between says how far the run is."""
    now = iter(range(10_000))
    monkeypatch.setattr(live.time, "monotonic", lambda: float(next(now)))
    looks = [[{"event": "start", "node": "n"}], *([done(case)] for case in CASES), [{"event": "end"}]]
    monkeypatch.setattr(live.time, "sleep", lambda seconds: tell(run, looks.pop(0)) if looks else None)
    monkeypatch.setattr(RunProgress, "active", property(lambda self: [*looks]))
    log = Console(record=True, width=160, file=io.StringIO())
    follow(log, RunProgress(run), known=["0000"])
    lines = [line.partition(" ")[2] for line in log.export_text().splitlines()]
    groups = [line for line in lines if line.startswith("hgemm float16")]
    assert [line.partition(":")[0].split()[-1] for line in groups] == ["64x64x64", "32x32x32"]
    progress = [line for line in lines if line.startswith("shards:")]
    assert len(groups) + len(progress) == len(lines) and 2 <= len(progress) <= 4
    assert progress[0].startswith("shards: ") and progress[-1].endswith("6 of 6 rows")


def test_a_log_says_within_seconds_what_is_compiled_and_soon_only_once_a_minute(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in which each of 300 kernels takes a second to compile."""
    now, told = 0.0, 0

    def compile_one(seconds: float) -> None:
        nonlocal now, told
        now, told = now + 1, told + 1
        tell(run, [{"event": "build", "kernel": f"v{told}", "number": told, "of": 300}])

    monkeypatch.setattr(live.time, "monotonic", lambda: now)
    monkeypatch.setattr(live.time, "sleep", compile_one)
    monkeypatch.setattr(RunProgress, "active", property(lambda self: told < 300))
    log = Console(record=True, width=160, file=io.StringIO())
    follow(log, RunProgress(run), known=["0000"])
    lines = log.export_text().splitlines()
    numbers = [int(found[1]) for line in lines if (found := re.search(r"compiling (\d+) of 300 kernels", line))]
    assert numbers == [5, 15, 35, 75, 135, 195, 255]


@pytest.mark.parametrize(
    ("rows", "last", "said"),
    [
        (6, "done", "Stopped; every case has its row."),
        (5, "done", "To go on: "),
        (6, "first", "1 of these cases have cold times only"),
    ],
)
def test_ctrl_c_says_how_to_go_on_only_where_something_is_left(
    run: Run, rows: int, last: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = Path(run.request.results) / "a-cpu" / run.name
    where.mkdir(parents=True)
    about = {"case": "", "dtype": "float16", "params": CASES[0].params, "metric": "TFLOP/s"}
    found = [row(c.kernel, 100, **about | {"case": c.key, "shape": c.shape}) for c in CASES[:rows]]
    store.write(store.to_table(found), where / "0000-000.parquet")
    tell(run, [*map(done, CASES[: rows - 1]), done(CASES[rows - 1]) | {"event": last}])

    def interrupt(*about: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "follow", interrupt)
    monkeypatch.setattr(executors, "cancel", lambda *about: [])
    console = Console(record=True, width=160, file=io.StringIO())
    executor = local.Local(Cluster("local"), Container())
    assert start.finish(console, run, executor, Plan(CASES, {}, {})) == 130
    text = console.export_text()
    assert said in text and ("To go on" in text) == (rows < 6 or last == "first")
    assert text.count("cpu_naive") >= 2  # the table of what is there
