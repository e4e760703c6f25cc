"""What a launcher shows while jobs run: a table of the newest rows on a terminal, or lines in a log."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from minfer.ops import Case
from minfer.rows import store
from minfer.run import times
from minfer.run.progress import RunProgress, format_time

POLL_S = 0.2
FIRST_S = 5.0  # from the first to the second line of a log that say how far the run is; doubled each time
LINE_S = 60.0  # but at most this
BELOW = 8  # lines of a terminal that the table's rows must leave free: for its head, what is below it, and the prompt

Key = tuple[str, str]  # an op and a problem


@dataclass(frozen=True)
class Shown:
    """A row that has come."""

    case: Case
    status: str
    row: store.Row  # the columns of `store.TOLD`

    @property
    def speedup(self) -> float | None:
        """Over the baseline. None for the baseline itself, and if the ratio's interval is too wide to show it."""
        is_other = self.case.kernel != self.row["baseline"] and not times.is_wide(self.row)
        return times.value_of(self.row, "speedup") if is_other else None


class Board:
    """The rows of a run in the order in which they came, and what its jobs are doing now."""

    def __init__(self, progress: RunProgress) -> None:
        self.progress = progress
        self.cases = {case.key: case for case in progress.cases}
        self.rows: list[Shown] = []
        self.doing = "starting: jobs import PyTorch first"
        self.best: dict[Key, Shown] = {}
        self._first: defaultdict[Key, set[str]] = defaultdict(set)  # cases that only have a row of the first pass
        self._passed = set[Key]()  # problems of which every case has had a row
        self._left = Counter((case.op, case.problem) for case in progress.cases)
        self._groups = Counter(self._left)

    def take(self, event: dict[str, Any]) -> Key | None:
        """Bring the board up to date with an event of a shard. Returns a problem if the event was its last row."""
        match event["event"]:
            case "building" | "build":
                of = (
                    f"compiling {event['number']} of {event['of']} kernels ({event['kernel']})" if "of" in event else ""
                )
                self.doing = of or "looking for compiled kernels"
            case "built":
                self.doing = "preparing the device"
            case "waiting":
                self.doing = f"waiting: {event.get('why') or 'another run uses the GPU'}"
            case "case":
                self.doing = (
                    f"running {_name(self.cases[event['case']])}" if event["case"] in self.cases else self.doing
                )
            case "end":
                self.doing = "ending"
            case "profiler":
                self.doing = f"profiling: {event['profiler']}"
            case "first" | "done" | "skip" | "kept" if case := self.cases.get(event["case"]):
                return self._add(case, event)
        return None

    def _add(self, case: Case, event: dict[str, Any]) -> Key | None:
        group = case.op, case.problem
        if event["event"] in ("first", "done"):
            told = dict.fromkeys(store.TOLD) | {"kernel": case.kernel} | event.get("row", {})
            new = [Shown(case, event.get("status", ""), told)]
            if case.key in self._first[group]:
                self.rows = [shown for shown in self.rows if shown.case.key != case.key]
                self.best.pop(group, None)
                new = [shown for shown in self.rows if (shown.case.op, shown.case.problem) == group] + new
            self.rows.append(new[-1])
            for shown in new:
                best = self.best.get(group)
                if shown.speedup and (best is None or shown.speedup > (best.speedup or 0.0)):
                    self.best[group] = shown
        if event["event"] == "first":
            self._first[group].add(case.key)
        else:
            self._first[group].discard(case.key)
            self._left[group] -= 1
        is_shown = len(self._first[group]) == self._left[group] and group not in self._passed
        if is_shown:  # each of its cases has a row now, of the first pass or in full
            self._passed.add(group)
        return group if is_shown or self._left[group] == 0 else None

    def describe_best(self, group: Key) -> str:
        """The fastest kernel of a problem so far, in words; empty if none was compared with a baseline."""
        if not (best := self.best.get(group)):
            return ""
        rate, us = times.value_of(best.row, "rate"), times.value_of(best.row, "us")
        figures = f"{us:,.1f} µs" + (f", {rate:.3g} {best.row['metric']}" if rate is not None else "")
        share, is_tie, _ = times.share_of_baseline(best.row).partition(" tie")
        return f"{best.case.kernel} with {figures}, {share} % of {best.row['baseline']}{', a tie' if is_tie else ''}"

    def describe_group(self, group: Key) -> str:
        """A line of a log about a problem whose cases all have a row."""
        case = next(case for case in self.cases.values() if (case.op, case.problem) == group)
        best = self.describe_best(group)
        cold = ", some with cold times only" if self._left[group] else ""
        rows = "1 row" if self._groups[group] == 1 else f"{self._groups[group]} rows"
        return f"{_name_problem(case)}: {rows}{cold}{f'; the best is {best}' if best else ''}"

    def tabulate(self, height: int) -> Table:
        """The last rows, as many as fit."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for name in ("op", "kernel", "problem"):
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        for name in ("time µs", "% of baseline"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("status", no_wrap=True)
        for each in self.rows[-max(1, height) :]:
            us = times.value_of(each.row, "us")
            table.add_row(
                each.case.op, each.case.kernel, _setting(each.case), "" if us is None else f"{us:,.1f}",
                times.share_of_baseline(each.row), each.status,
            )  # fmt: skip
        return table


def _setting(case: Case) -> str:
    """Dtype, parameters and shape, in few characters."""
    return " ".join([case.dtype, *case.params.values(), "x".join(map(str, case.shape.values()))])


def _name_problem(case: Case) -> str:
    return f"{case.op} {_setting(case)}"


def _name(case: Case) -> str:
    return f"{case.op} {case.kernel} {_setting(case)}"


def follow(console: Console, progress: RunProgress, known: Collection[str] = ()) -> None:
    """Show progress until all jobs are done, or a shard has failed that is not among the known ones. On a terminal, the rows
    as they come; in a log, a line for each problem whose rows are all there, and some on how far the run is: soon after the
    start, then at most one a minute."""
    board, warned, is_first = Board(progress), set[str](), True
    shown, due, gap = "", 0.0, FIRST_S
    with _screen(console, board) as update:
        while True:
            for event in progress.read():
                group = board.take(event)
                update(event)
                if group and not console.is_terminal and not is_first:  # not for the rows that were there before
                    console.print(f"{_now()} {board.describe_group(group)}", soft_wrap=True)
            is_first = False
            ends = not progress.active or bool(set(progress.failed) - set(known))
            doing = "" if ends or progress.queued else f"; {board.doing}"
            line = progress.line().partition(", about")[0] + doing
            if not console.is_terminal and line != shown and (ends or time.monotonic() >= due):
                console.print(f"{_now()} {progress.line()}{doing}", soft_wrap=True)
                shown, due, gap = line, time.monotonic() + gap, min(LINE_S, 2 * gap)
            for warning in progress.warnings():
                if warning not in warned:
                    console.print(f"Note: {warning}.", soft_wrap=True)
                    warned.add(warning)
            if ends:
                break
            time.sleep(max(POLL_S, len(progress.shards) / 1000))  # each turn reads a file for each shard


def _now() -> str:
    return f"{datetime.datetime.now():%H:%M:%S}"


@contextlib.contextmanager
def _screen(console: Console, board: Board) -> Iterator[Any]:
    """Show a board on a terminal, and remove it at the end. Yields a function to call with each event. In a log no board is
    shown."""
    if not console.is_terminal:
        yield lambda event: None
        return
    bars = Progress(
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False), console=console
    )  # fmt: skip
    bar = bars.add_task("", total=len(board.progress.cases))

    def update(event: dict[str, Any]) -> None:
        if event["event"] in ("done", "skip", "kept", "profiled"):
            bars.advance(bar)
        elif event["event"] == "profiler":
            bars.update(bar, total=(bars.tasks[0].total or 0) + event["cases"])

    def render() -> Group:
        left = round(board.progress.left_s() or 0)
        bars.update(bar, description=f"about {format_time(left)} left" if left else "")
        doing = board.progress.line() if board.progress.queued else board.doing
        parts: list[Any] = [bars, Text(doing, no_wrap=True, overflow="ellipsis")]
        if board.rows:
            group = board.rows[-1].case.op, board.rows[-1].case.problem
            if best := board.describe_best(group):
                said = f"best so far at {_name_problem(board.rows[-1].case)}: {best}"
                parts.insert(0, Text(said, no_wrap=True, overflow="ellipsis"))
            parts.insert(0, board.tabulate(console.height - BELOW))
        return Group(*parts)

    with Live(get_renderable=render, console=console, transient=True, refresh_per_second=4):
        yield update
