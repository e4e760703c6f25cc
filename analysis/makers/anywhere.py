"""How fast minfer's functions are at randomly drawn problems, from parquet: `python analysis/make.py anywhere`.

Reads the rows of drawn problems (`+sweep=anywhere`), which no other table shows. Between `<!-- anywhere:begin -->` and
`<!-- anywhere:end -->` of docs/anywhere.md it writes a table of each device with a line a function, and a plot of all problems.
Between `<!-- drawn:begin -->` and `<!-- drawn:end -->` of an op's page, docs/<op>.md, it writes the same figures by ranges of
sizes, and the names of the slowest ten. Between the same markers in the README it writes a paragraph and the plot of the first
device. A ratio is the function's speed over that of the fastest other implementation, cold.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from minfer.analysis.data.others import best_other, compare_with_other
from minfer.analysis.data.prepare import WHICH, primary, with_problem
from minfer.analysis.makers import Maker, Options
from minfer.analysis.plots import files
from minfer.analysis.plots.every_op import Picture
from minfer.analysis.plots.strips import strips
from minfer.analysis.tables.markdown import escape, has_markers, significant, table_lines, update
from minfer.rows import store
from minfer.rows.problems import natural, number
from minfer.rows.rules import is_too_wide

COMMAND = "python analysis/make.py anywhere"
FUNCTION = "function"  # the backend of minfer's functions
DEFINITION = "torch_eager"  # in fp32 and in several launches; not an implementation that anybody would use
TOO_WIDE = "the interval of its ratio is too wide"
WORST = 10  # problems of an op that are named
NAMED = 4  # functions in the README's sentence: those with the most problems
FEWEST = 5  # problems that a source needs to be shown
PLOT = "anywhere-functions"
NEAREST = "the nearest shape measured"
DECIDED_BY = {  # by what a row's `chosen` says
    "by models of the times": "models",
    "by a rule": "a rule",
    "nearest shape measured": NEAREST,
    "at this shape": "rows of this shape",
}
FIGURES = ["Problems", "Geometric mean", "Least", "Not slower"]
# What tells small problems from large ones, by the axis of the op: the first of these that it has.
SIZES = {"m": "M", "tokens": "Tokens", "rows": "Rows", "seq_q": "Queries of a sequence", "batch": "Requests"}
STARTS = (1, 17, 129, 1025, 8193)  # of the ranges of sizes
ABOUT = """\
## At drawn problems

Kernels are tuned at some sizes; these problems are drawn at random from the layers of public models. A ratio is the function's
speed, in cold calls, over that of the fastest implementation outside of minfer at the same problem. *Not slower* is the share
of problems at which the function is faster or ties. [The page of all functions](anywhere.md) says how problems are drawn, for
which ops the ratio says little, and whether the rules that choose a kernel are newer than the rows.
"""
NO_ROWS = "No rows yet: `uv run python -m minfer.launch +sweep=anywhere draw.problems=200 draw.seed=14` makes some.\n"
COLUMNS = [*WHICH, "dtype", "params", "shape", "device", "device_kind", "torch", "drawn", "source", "chosen", "message"]
COLUMNS += [f"cold_{name}" for name in ("us", "baseline_us", "speedup", "speedup_low", "speedup_high", "aa_spread")]
COLUMNS += ["cold_verdict", "baseline"]


@dataclass(frozen=True)
class Point:
    """A function at a drawn problem: its speed over the best other's, whether that is faster, a tie or slower, and which."""

    row: store.Row
    ratio: float
    verdict: str
    other: str


@dataclass(frozen=True)
class Distribution:
    """A function's ratios at the problems of some seeds, the least first."""

    op: str
    name: str
    seeds: list[int]
    points: list[Point]
    without: list[str]  # for each drawn problem without a ratio, why it has none


def distributions(table: pa.Table) -> dict[str, list[Distribution]]:
    """The distributions of each device, by op: one for each function, from its rows of one `source` (`last_source`). Other rows
    are of other kernels or rules, and a function's choice may have been fitted to them. `table` has rows of drawn problems
    only."""
    rows = with_problem(table).to_pylist(maps_as_pydicts="lossy")
    found: dict[str, list[Distribution]] = {}
    for device in primary(table):
        here = [row for row in rows if row["device"] == device]
        functions = [row for row in here if row["backend"] == FUNCTION]
        of_function: dict[tuple[str, str], list[store.Row]] = {}
        for row in functions:
            of_function.setdefault((row["op"], row["kernel"]), []).append(row)
        for (op, name), its in sorted(of_function.items()):
            source = last_source(its)
            mine = [row for row in its if row["source"] == source]
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
                found.setdefault(device, []).append(
                    Distribution(op, name, sorted({row["drawn"] for row in mine}), known, without)
                )
    return found


def last_source(rows: Iterable[store.Row]) -> str:
    """The most recently timed `source`, a hash of the function's kernels and rules, with at least `FEWEST` measured problems
    whose baseline is not the definition. If there is none, the most recently timed."""
    of_source: dict[str, list[store.Row]] = {}
    for row in sorted(rows, key=lambda row: row["finished"], reverse=True):
        of_source.setdefault(row["source"], []).append(row)

    def count(mine: Iterable[store.Row]) -> int:
        return sum(row["status"] in store.MEASURED and row["baseline"] != DEFINITION for row in mine)

    return next((source for source, mine in of_source.items() if count(mine) >= FEWEST), next(iter(of_source)))


def joined(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds))


def _point(row: store.Row, beside: Iterable[store.Row]) -> Point | str:
    """The point of a row, or why it has no ratio that may be shown."""
    failed = f"{row['status']}: {row['message']}"
    if row["status"] not in store.MEASURED:
        return failed
    other = best_other(beside, "cold")
    if (other["kernel"] if other else row["baseline"]) == DEFINITION:
        return f"only {DEFINITION}, the definition in several launches, was timed beside it"
    ratio = compare_with_other(row, other, "cold")
    if other and ratio:
        if is_too_wide(ratio.low, ratio.high):
            return TOO_WIDE
        return Point(row, ratio.value, ratio.verdict, other["kernel"])
    for baseline in beside:
        if baseline["kernel"] == row["baseline"] and baseline["status"] not in store.MEASURED:
            return f"the baseline, {row['baseline']}, was {baseline['status']}"
    speedup = number(row, "cold_speedup")
    if not speedup or not row["cold_verdict"]:
        return failed
    if is_too_wide(row["cold_speedup_low"], row["cold_speedup_high"]):
        return TOO_WIDE
    return Point(row, speedup, row["cold_verdict"], row["baseline"])


def figures(points: list[Point]) -> list[str]:
    """The cells of FIGURES. `points` has the least ratio first."""
    mean = math.exp(sum(math.log(point.ratio) for point in points) / len(points))
    share = sum(point.verdict != "slower" for point in points) / len(points)
    return [str(len(points)), f"{significant(mean, 3)}×", f"{significant(points[0].ratio, 3)}×", f"{100 * share:.0f} %"]


def overview(device: str, found: list[Distribution], picture: str, docs: Path) -> Iterator[str]:
    """What docs/anywhere.md tells of a device."""
    yield from [f"## {escape(device)}", "", picture, ""]
    body = []
    for of in found:
        name = f"`minfer.{of.name}`"
        if (docs / f"{of.op}.md").is_file():
            name = f"[{name}]({of.op}.md#at-drawn-problems)"
        body.append([name, joined(of.seeds), *figures(of.points), str(len(of.without))])
    yield from table_lines(["Function", "Seed", *FIGURES, "Without a ratio"], [":--", *["--:"] * 6], body)
    yield ""


def readme_lines(device: str, found: list[Distribution], picture: str) -> Iterator[str]:
    """What the README tells of a device."""
    most = sorted(found, key=lambda of: len(of.points), reverse=True)[:NAMED]
    each = [(f"`minfer.{of.name}`", *figures(of.points)[:3]) for of in most]
    names = ", ".join(
        f"{name} {mean} ({least}, {count} problem{'s' * (count != '1')})" for name, count, mean, least in each
    )
    yield (
        f"**At random sizes.** On one {escape(device)}, functions were timed at problems drawn at random from the layers of "
        "public models, beside the fastest other implementation. Their relative speed in the geometric mean (and the least) "
        f"is, for the functions with the most problems: {names}. Where PyTorch has no such kernel, as for GGUF's formats of "
        "weights, the other takes several launches, so the ratio says little. "
        "[All functions, and their slowest problems](docs/anywhere.md)."
    )
    yield from ["", picture, ""]


def section(found: list[tuple[str, Distribution]]) -> Iterator[str]:
    """What the page of an op tells of its functions, each with a device."""
    yield ABOUT
    if not found:
        yield NO_ROWS
    for device, of in found:
        yield from [
            f"**{escape(device)} · `minfer.{of.name}` · seed{'s' * (len(of.seeds) > 1)} {joined(of.seeds)}**",
            "",
            *range_lines(of.points),
            "",
        ]
        worst = [
            [
                escape(point.row["problem"]), f"{significant(point.ratio, 3)}×", escape(point.other),
                escape(str(point.row["chosen"] or "").partition(",")[0]),
                by_what(point),
            ]
            for point in of.points[:WORST]
        ]  # fmt: skip
        header = ["The slowest problems", "Speed over the best other", "Best other", "Chosen kernel", "Chosen by"]
        yield from [*table_lines(header, [":--", "--:", ":--", ":--", ":--"], worst), ""]
        if by_nearest := [point for point in of.points if by_what(point) == NEAREST]:
            count, mean, least, share = figures(by_nearest)
            yield from [
                f"Chosen by {NEAREST}: {count} of {len(of.points)} problems, {mean} in the geometric mean, {least} at least, "
                f"{share} not slower.",
                "",
            ]
        if of.without:
            why = sorted(set(of.without), key=natural)
            yield from [f"Without a ratio, {len(of.without)}: {escape('; '.join(why), 300)}", ""]


def by_what(point: Point) -> str:
    """What decided which kernel the function called."""
    why = str(point.row["chosen"] or "")
    return next((what for text, what in DECIDED_BY.items() if text in why), "")


def range_lines(points: list[Point]) -> list[str]:
    """A line for each range of sizes that has problems, and one for all; of each group of formats, where an op has some."""
    axis = next((axis for axis in SIZES if axis in points[0].row["shape"]), "")
    body = []
    for form, group in groupby(sorted(points, key=format_of, reverse=True), format_of):
        of_form = list(group)
        for first, after in pairwise((*STARTS, math.inf)):
            inside = [point for point in of_form if first <= point.row["shape"].get(axis, 0) < after]
            size = f"{first}–{after - 1}" if after < math.inf else f"from {first}"
            if inside:
                body.append([form, size, *figures(inside)])
        body.append([form, "all", *figures(of_form)])
    header = ["Format", SIZES.get(axis, "Size"), *FIGURES]
    shown = slice(0 if body[0][0] else 1, None)
    return table_lines(header[shown], [":--", *["--:"] * 5][shown], [cells[shown] for cells in body])


def format_of(point: Point) -> str:
    """The group of a format of weights: int4, fp8 or GGUF, whose best others differ. Empty for an op that has no formats."""
    name = (point.row["params"] or {}).get("format", "")
    return next((form for form in ("int4", "fp8") if name.startswith(form)), "GGUF") if name else ""


def picture_of(device: str, found: list[Distribution]) -> Picture:
    groups = {of.name: [(point.ratio, point.verdict) for point in of.points] for of in found}
    return strips(f"Functions at drawn problems on {device}", groups)


def write(table: pa.Table, options: Options) -> list[str]:
    found = distributions(table.filter(pc.is_valid(table["drawn"])))
    pictures = {options.plots / store.slug(device) / PLOT: picture_of(device, of) for device, of in found.items()}
    problems = files.bring_up_to_date(pictures, options.plots, PLOT, COMMAND, options.check)
    page = options.docs / "anywhere.md"
    text: list[str] = []
    sections: dict[str, list[tuple[str, Distribution]]] = {}
    for device, of_device in found.items():
        path = options.plots / store.slug(device) / PLOT
        shown = Path(os.path.relpath(path, page.parent)).as_posix()
        text += overview(device, of_device, files.shown(shown, pictures[path].about), options.docs)
        for of in of_device:
            sections.setdefault(of.op, []).append((device, of))
    told = [update(page, "anywhere", "\n".join(text) or NO_ROWS, COMMAND, options.check)]
    for of_op in sorted(options.docs.glob("*.md")):
        if of_op.stem in sections or has_markers(of_op, "drawn"):
            body = "\n".join(section(sections.get(of_op.stem, [])))
            told.append(update(of_op, "drawn", body, COMMAND, options.check))
    if has_markers(options.readme, "drawn"):
        lines: list[str] = []
        for device, of_device in [*found.items()][:1]:
            path = options.plots / store.slug(device) / PLOT
            shown = Path(os.path.relpath(path, options.readme.parent)).as_posix()
            lines += readme_lines(device, of_device, files.shown(shown, pictures[path].about))
        told.append(update(options.readme, "drawn", "\n".join(lines) or NO_ROWS, COMMAND, options.check))
    return problems + [problem for problem in told if problem]


MAKER = Maker(write, COLUMNS, of_drawn=True)
