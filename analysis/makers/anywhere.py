"""How fast minfer's functions are at randomly drawn problems, from parquet: `python analysis/make.py anywhere`.

Reads the rows of drawn problems (`+sweep=anywhere`), which no other table shows, and writes a table of each device between the
markers `<!-- anywhere:begin -->` and `<!-- anywhere:end -->` of docs/anywhere.md, with a plot of all problems and the names of
the slowest ten of each op. A ratio is the function's speed over that of the fastest other implementation, cold.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from minfer.analysis.data.others import best_other, compare_with_other
from minfer.analysis.data.prepare import WHICH, primary, with_problem
from minfer.analysis.makers import Maker, Options
from minfer.analysis.plots import files
from minfer.analysis.plots.every_op import Picture
from minfer.analysis.plots.strips import strips
from minfer.analysis.tables.markdown import escape, significant, table_lines, update
from minfer.rows import store
from minfer.rows.problems import natural, number
from minfer.rows.rules import is_too_wide

COMMAND = "python analysis/make.py anywhere"
FUNCTION = "function"  # the backend of minfer's functions
DEFINITION = "torch_eager"  # in fp32 and in several launches; not an implementation that anybody would use
TOO_WIDE = "the interval of its ratio is too wide"
WORST = 10  # problems of an op that are named
PLOT = "anywhere-functions"
COLUMNS = [*WHICH, "dtype", "shape", "device", "device_kind", "torch", "drawn", "chosen", "message", "baseline"]
COLUMNS += [f"cold_{name}" for name in ("us", "baseline_us", "speedup", "speedup_low", "speedup_high", "aa_spread")]
COLUMNS += ["cold_verdict"]


@dataclass(frozen=True)
class Point:
    """A function at a drawn problem: its speed over the best other's, whether that is faster, a tie or slower, and which."""

    row: store.Row
    ratio: float
    verdict: str
    other: str


@dataclass(frozen=True)
class Distribution:
    """A function's ratios at the problems of a seed, the least first."""

    name: str
    seed: int
    points: list[Point]
    without: list[str]  # for each drawn problem without a ratio, why it has none

    @property
    def mean(self) -> float:
        return math.exp(sum(math.log(point.ratio) for point in self.points) / len(self.points))

    @property
    def share(self) -> float:
        """Of problems at which it is not slower."""
        return sum(point.verdict != "slower" for point in self.points) / len(self.points)


def distributions(table: pa.Table) -> dict[str, list[Distribution]]:
    """Of each device, the distributions of its functions, by op and seed. `table` has rows of drawn problems only."""
    rows = with_problem(table).to_pylist(maps_as_pydicts="lossy")
    found: dict[str, list[Distribution]] = {}
    for device in primary(table):
        here = [row for row in rows if row["device"] == device]
        functions = [row for row in here if row["backend"] == FUNCTION]
        for op, name, seed in sorted({(row["op"], row["kernel"], row["drawn"]) for row in functions}):
            mine = [row for row in functions if (row["op"], row["kernel"], row["drawn"]) == (op, name, seed)]
            beside: dict[str, list[store.Row]] = {}
            for row in here:
                if row["op"] == op:
                    beside.setdefault(row["problem"], []).append(row)
            points = {row["case"]: _point(row, beside[row["problem"]]) for row in mine}
            known = sorted((x for x in points.values() if isinstance(x, Point)), key=lambda point: point.ratio)
            without = [
                x for row in mine if isinstance(x := points[row["case"]], str) and row["status"] != "unsupported"
            ]
            if known:
                found.setdefault(device, []).append(Distribution(name, seed, known, without))
    return found


def _point(row: store.Row, beside: Iterable[store.Row]) -> Point | str:
    """The point of a row, or why it has no ratio that may be shown."""
    failed = f"{row['status']}: {row['message']}"
    if row["status"] not in store.MEASURED:
        return failed
    other = best_other(beside, "cold")
    if (other["kernel"] if other else row["baseline"]) == DEFINITION:
        return f"nothing but {DEFINITION}, the definition in several launches, was timed beside it"
    ratio = compare_with_other(row, other, "cold")
    if other and ratio:
        if is_too_wide(ratio.low, ratio.high):
            return TOO_WIDE
        return Point(row, ratio.value, ratio.verdict, other["kernel"])
    speedup = number(row, "cold_speedup")
    if not speedup or not row["cold_verdict"]:
        return failed
    if is_too_wide(row["cold_speedup_low"], row["cold_speedup_high"]):
        return TOO_WIDE
    return Point(row, speedup, row["cold_verdict"], row["baseline"])


def lines(device: str, found: list[Distribution], picture: str) -> Iterator[str]:
    """What is told of a device."""
    yield from [f"## {escape(device)}", "", picture, ""]
    header = ["Function", "Seed", "Problems", "Geometric mean", "Least", "Not slower", "Without a ratio"]
    body = [
        [
            f"`minfer.{of.name}`", str(of.seed), str(len(of.points)), f"{significant(of.mean, 3)}×",
            f"{significant(of.points[0].ratio, 3)}×", f"{100 * of.share:.0f} %", str(len(of.without)),
        ]
        for of in found
    ]  # fmt: skip
    yield from table_lines(header, [":--", *["--:"] * 6], body)
    for of in found:
        yield from ["", f"The slowest of `minfer.{of.name}`, seed {of.seed}:", ""]
        worst = [
            [
                escape(point.row["problem"]), f"{significant(point.ratio, 3)}×", escape(point.other),
                escape(str(point.row["chosen"] or "").partition(",")[0]),
            ]
            for point in of.points[:WORST]
        ]  # fmt: skip
        yield from table_lines(
            ["Problem", "Speed over the best other", "Best other", "Chosen kernel"], [":--", "--:", ":--", ":--"], worst
        )
        if of.without:
            why = sorted(set(of.without), key=natural)
            yield from ["", f"Without a ratio, {len(of.without)}: {escape('; '.join(why), 300)}"]
    yield ""


def picture_of(device: str, found: list[Distribution]) -> Picture:
    groups = {f"{of.name} ({of.seed})": [(point.ratio, point.verdict) for point in of.points] for of in found}
    return strips(f"Functions at drawn problems on {device}", groups)


def write(table: pa.Table, options: Options) -> list[str]:
    found = distributions(table.filter(pc.is_valid(table["drawn"])))
    pictures = {options.plots / store.slug(device) / PLOT: picture_of(device, of) for device, of in found.items()}
    problems = files.bring_up_to_date(pictures, options.plots, PLOT, COMMAND, options.check)
    page = options.docs / "anywhere.md"
    text: list[str] = []
    for device, of in found.items():
        path = options.plots / store.slug(device) / PLOT
        shown = Path(os.path.relpath(path, page.parent)).as_posix()
        text += lines(device, of, files.shown(shown, pictures[path].about))
    body = (
        "\n".join(text)
        or "No rows yet: `uv run python -m minfer.launch +sweep=anywhere draw.problems=200 draw.seed=7` makes some.\n"
    )
    problem = update(page, "anywhere", body, COMMAND, options.check)
    return problems + ([problem] if problem else [])


MAKER = Maker(write, COLUMNS, of_drawn=True)
