"""Ladder, and throughput over size: each a function from the rows of one op on one device to a picture.

The rows are measured ones, in ladder order, of one metric, maps as dictionaries, and with a `problem`: the case's key
without op and kernel. Any other column may be null. One picture has one idea: the ladder, how far each rung comes on one
problem; throughput over size, where which kernel is the fastest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from minfer.analysis.data.others import best_other
from minfer.analysis.data.prepare import REFERENCE
from minfer.analysis.plots.series import (
    LEAST_SIZES,
    Series,
    over_tokens,
    problem,
    representative,
    series,
    setting,
    words,
)
from minfer.analysis.plots.style import LIGHT, SMALL, Theme, figure, name_ends, printable, title
from minfer.analysis.tables.markdown import format_scaled, scale, significant
from minfer.analysis.tables.problem import fastest_of_ours
from minfer.rows.problems import natural, number
from minfer.rows.rules import REGIMES, is_too_wide
from minfer.rows.store import Row

MOST_COLOURED = 4  # lines beside PyTorch's that have a colour and a name
FAR = 8.0  # times the fastest bar: a ladder has no roof beyond that, because it would leave no room for the bars
FAR_LINE = 3.0  # times the fastest point of a plot over sizes: a roof beyond that would leave no room for the lines
RUNG = 0.27  # inches of a ladder's rung
TICKS_APART = 0.05  # of an axis: what the label of a size takes
COLUMNS = {"cold": (52.0, 110.0), "steady": (164.0, 222.0)}  # points right of a ladder: where its figures end


class LeftOut(Exception):
    """There is not enough to draw; the message says what is missing."""


@dataclass
class Picture:
    """A figure, in one sentence what it shows, and where it has one the table of its points as CSV, kept beside it."""

    figure: Figure
    about: str
    csv: str = ""


def ladder(op: str, device: str, rows: list[Row], theme: Theme = LIGHT) -> Picture:
    """The kernels of the representative problem as bars in ladder order, cold, with a mark where steady calls end up."""
    rows = representative([row for row in rows if number(row, "cold_rate")])
    if len(rows) < 2:
        raise LeftOut("it takes a problem that two kernels have cold times of")
    drawn, (ax,) = figure([0.35 + RUNG * len(rows)], right=0.54)
    metric, best, roof, torch = rows[0]["metric"], fastest_of_ours(rows), roof_of(rows), reference_rate(rows)
    if roof and roof > FAR * max(number(row, "cold_rate") or 0.0 for row in rows):
        roof = None  # the peak of the arithmetic was not measured, and the roof of memory alone is too far to mean anything
    regimes = [regime for regime in REGIMES if any(number(row, f"{regime}_rate") for row in rows)]
    title(ax, f"{op} on {device}: the ladder", problem(rows[0]), width=56)  # beside the heads of the columns
    limit = 1.03 * max(
        roof or 0.0, torch or 0.0, *(number(row, f"{regime}_rate") or 0.0 for row in rows for regime in REGIMES)
    )
    for place, row in enumerate(rows):
        mine = best is not None and row["kernel"] == best["kernel"]
        color = theme.torch if row["kernel"] == REFERENCE else theme.ours if mine else theme.pale
        ax.barh(place, row["cold_rate"], 0.7, color=color, label=row["kernel"])
        if rate := number(row, "steady_rate"):
            ax.plot([rate, rate], [place - 0.35, place + 0.35], color=theme.ink, linewidth=2, label="steady")
        for regime, ends in COLUMNS.items():
            if number(row, f"{regime}_rate"):
                texts = (format_scaled(row[f"{regime}_rate"]), share(row, regime, rows) if torch else "")
                for text, end in zip(texts, ends, strict=True):
                    beside(ax, text, place, end, bold=mine)
    if torch:
        ax.axvline(torch, color=theme.torch, linestyle="--", linewidth=1, zorder=0.5)
    if roof:
        ax.axvline(roof, color=theme.muted, linestyle=":", linewidth=1.2, zorder=0.5)
    for regime in regimes:
        left, right = COLUMNS[regime]
        for line, end, text in ((-1.75, left, regime), (-1.0, left, metric), (-1.0, right, "% of torch" * bool(torch))):
            beside(ax, text, line, end, bold=text == regime)
    rungs(ax, [row["kernel"] for row in rows])
    for label, row in zip(ax.get_yticklabels(), rows, strict=True):
        if best is not None and row["kernel"] == best["kernel"]:
            label.set_fontweight("bold")
    ax.set_xlim(0, limit)
    plain_ticks(ax.xaxis)
    key = ["bar: cold", *(["mark: steady"] if "steady" in regimes else [])]
    key += ["dashed: torch, cold"] if torch else []
    key += [f"dotted: measured peak, {format_scaled(roof)}"] if roof else []
    ax.set_xlabel(printable(f"throughput, {metric}"))
    ax.annotate(printable(" · ".join(key)), (0, 0), (0, -46), "axes fraction", "offset points", fontsize=SMALL)
    return Picture(drawn, ladder_sentence(op, device, rows, best))


def ladder_sentence(op: str, device: str, rows: list[Row], best: Row | None) -> str:
    """What the ladder shows, for who cannot see it."""
    metric, at = rows[0]["metric"], f"{op} on {device} at {problem(rows[0])}"
    if best is None or all(REFERENCE not in (row["kernel"], best["baseline"]) for row in rows):
        return f"Bars of the cold throughput of {len(rows)} kernels of {at}, in {metric}."
    shares = [f"{share(best, regime, rows)} % {regime}" for regime in REGIMES if number(best, f"{regime}_rate")]
    return f"Ladder of {at}: {best['kernel']} reaches {' and '.join(shares)} of PyTorch's throughput."


def share(row: Row, regime: str, rows: list[Row]) -> str:
    """Throughput in percent of PyTorch's: the paired ratio where PyTorch was the baseline, as tables have it."""
    if is_too_wide(number(row, f"{regime}_speedup_low"), number(row, f"{regime}_speedup_high")):
        return "—"
    ratio = number(row, f"{regime}_speedup") if row["baseline"] == REFERENCE != row["kernel"] else None
    torch = next((number(r, f"{regime}_rate") for r in rows if r["kernel"] == REFERENCE), None)
    if ratio is None and torch:
        ratio = row[f"{regime}_rate"] / torch
    return significant(100 * ratio, 3 if ratio < 1 else 4) if ratio else "—"


def reference_rate(rows: list[Row]) -> float | None:
    """PyTorch's cold throughput at a problem: that of its row or, if it has none, the median that follows from the rows of the
    kernels that were timed beside it."""
    own = [rate for row in rows if row["kernel"] == REFERENCE and (rate := number(row, "cold_rate"))]
    beside = [
        row["cold_rate"] / ratio
        for row in rows
        if row["baseline"] == REFERENCE and number(row, "cold_rate") and (ratio := number(row, "cold_speedup"))
    ]
    return own[0] if own else float(np.median(beside)) if beside else None


def roof_of(rows: list[Row]) -> float | None:
    """What the measured peaks allow for one problem, in the metric's unit; `analysis.peaks` makes it the same for all of its
    kernels."""
    known = (row["cold_rate"] * 100 / percent for row in rows if (percent := number(row, "cold_percent_of_peak")))
    return max(known, default=None)


def beside(ax: Axes, text: str, place: float, end: float, bold: bool = False) -> None:
    """Text in a column at the right of the axes that ends that many points from them."""
    weight = "bold" if bold else "normal"
    ax.annotate(
        printable(text), (1, place), (end, 0), ax.get_yaxis_transform(), "offset points", ha="right", va="center",
        fontsize=SMALL, fontweight=weight,
    )  # fmt: skip


def throughput(op: str, device: str, rows: list[Row], theme: Theme = LIGHT) -> Picture:
    """The metric over the sizes of the series with most rows, cold, under what the measured peaks allow at each size.

    PyTorch and up to four kernels have a colour and a name (`choose_coloured`), the others are grey."""
    name, found = widest([row for row in rows if number(row, "cold_rate")])
    drawn, (ax,) = figure([3.6])
    over = "size" if found.square else found.label
    title(ax, f"{op} on {device}: throughput over {over}", " · ".join(filter(None, [words(name), found.fixed, "cold"])))
    lines = over_sizes(ax, found, theme)
    about = f"Cold throughput of {len(lines)} kernels of {op} on {device} over {found.over}"
    return Picture(drawn, f"{about}; at the largest, {fastest_at(lines, found, found.sizes[-1])} is the fastest.")


def over_sizes(ax: Axes, found: Series, theme: Theme) -> dict[str, list[Row]]:
    """Draws the lines of a series with their names; returns the rows of each by kernel, in the order of sizes."""
    lines: dict[str, list[Row]] = {}
    for row in found.rows:
        lines.setdefault(row["kernel"], []).append(row)
    hues = dict(zip(choose_coloured(lines, found), (theme.ours, *theme.rungs), strict=False)) | {REFERENCE: theme.torch}
    for kernel, line in sorted(lines.items(), key=lambda item: item[0] in hues):  # grey below the others
        line.sort(key=found.size)
        x, y = points(line, found)
        dashes, named = "o--" if kernel == REFERENCE else "o-", kernel in hues
        ax.plot(
            x, y, dashes, color=hues.get(kernel, theme.others), linewidth=2.0 if named else 1.0,
            markersize=4 if named else 2, label=kernel,
        )  # fmt: skip
    limits, far = scales(ax, found)
    ends = {
        kernel: (found.size(lines[kernel][-1]), lines[kernel][-1]["cold_rate"]) for kernel in hues if kernel in lines
    }
    rest = len(lines) - len(ends)
    said = [f"grey: {rest} other kernels" if rest > 1 else "grey: another kernel"] * (rest > 0)
    said += [f"measured peak, {format_scaled(far)}: off the axis"] if far else []
    ax.annotate("\n".join(said), (1.04, 0), (2, -9), "axes fraction", "offset points", va="top", fontsize=SMALL,
                color=theme.muted)  # fmt: skip
    if limits:
        ax.plot(*zip(*limits, strict=True), ":", color=theme.muted, linewidth=1.4, label="_peak")
        name = f"measured peak, {format_scaled(limits[-1][1])}"
        ends[name], hues[name] = limits[-1], theme.muted
    name_ends(ax, ends, hues)
    return lines


def points(line: list[Row], found: Series) -> tuple[list[int], list[float]]:
    """The sizes of a series from a line's first one to its last, and the rate at each. A size that was not measured has NaN,
    at which the plot interrupts the line."""
    rates = {found.size(row): float(row["cold_rate"]) for row in line}
    between = [size for size in found.sizes if min(rates) <= size <= max(rates)]
    return between, [rates.get(size, math.nan) for size in between]


def widest(rows: list[Row]) -> tuple[str, Series]:
    """Of all settings the series with most rows, and the setting. Raises LeftOut."""
    settings: dict[str, list[Row]] = {}
    for row in rows:
        settings.setdefault(setting(row), []).append(row)
    made = {name: over_tokens(of) or series(of) for name, of in settings.items()}
    shown = {name: found for name, found in made.items() if found and len(found.sizes) >= LEAST_SIZES}
    if not shown:
        raise LeftOut(f"it takes problems of at least {LEAST_SIZES} sizes that differ in one axis, or square ones")
    name = min(shown, key=lambda name: (-len(shown[name].rows), natural(name)))
    return name, shown[name]


def fastest_at(lines: Mapping[str, list[Row]], found: Series, size: int) -> str:
    at = [row for line in lines.values() for row in line if found.size(row) == size]
    return str(max(at, key=lambda row: float(row["cold_rate"]))["kernel"])


def choose_coloured(lines: Mapping[str, list[Row]], found: Series) -> list[str]:
    """The kernels beside PyTorch that have a colour: the fastest of ours at the largest size, the library to beat, those of
    ours that are the fastest at some size, and the rungs with the largest gain over all before them at the largest."""
    ours = {kernel: line for kernel, line in lines.items() if kernel != REFERENCE}
    if len(ours) <= MOST_COLOURED:
        last = {kernel: max(line, key=found.size) for kernel, line in ours.items()}
        return sorted(ours, key=lambda kernel: (-found.size(last[kernel]), -last[kernel]["cold_rate"]))
    at: dict[int, list[Row]] = {}
    for line in lines.values():
        for row in line:
            at.setdefault(found.size(row), []).append(row)
    first = {size: fastest_of_ours(of) or max(of, key=lambda row: float(row["cold_rate"])) for size, of in at.items()}
    wins = Counter(row["kernel"] for row in first.values() if row["kernel"] in ours)
    largest = first[max(first)]["kernel"]
    gains, before = dict[str, float](), 0.0
    for row in at[max(at)]:  # in ladder order
        if row["kernel"] in ours:
            gains[row["kernel"]] = row["cold_rate"] / before if before else 1.0
            before = max(before, row["cold_rate"])
    steps = sorted(gains, key=lambda kernel: -gains[kernel])
    others = (best_other(at[size], "cold") for size in sorted(at, reverse=True))
    to_beat = next((row["kernel"] for row in others if row), None)  # at the largest size where one beats PyTorch
    leading = [name for name in (largest, to_beat) if name in ours]
    wanted = dict.fromkeys([*leading, *(name for name, _ in wins.most_common()), *steps])
    return list(wanted)[:MOST_COLOURED]


def scales(ax: Axes, found: Series, roofs: bool = True) -> tuple[list[tuple[int, float]], float | None]:
    """Sets the axes of a plot over the sizes of a series. Returns what the measured peaks allow at each size, where that is
    near enough to be drawn; else none, and what they allow at the largest."""
    sizes, metric = found.sizes, found.rows[0]["metric"]
    allowed = {size: roof_of([row for row in found.rows if found.size(row) == size]) for size in sizes}
    most = max(row["cold_rate"] for row in found.rows)
    limits = [(size, rate) for size, rate in allowed.items() if rate and roofs]
    far = limits[-1][1] if len(limits) > 1 and max(rate for _, rate in limits) > FAR_LINE * most else None
    if far or len(limits) < 2:
        limits = []
    ax.set_xscale("log", base=2)
    ax.set_xlim(sizes[0] / 2**0.15, sizes[-1] * 2**0.15)
    ax.set_ylim(0, 1.08 * max([most, *(rate for _, rate in limits)]))
    ticked = keep_apart(sizes)
    ax.set_xticks(ticked, [str(size) for size in ticked])
    ax.minorticks_off()
    plain_ticks(ax.yaxis)
    ax.set_xlabel(f"side of the square problem, {found.label}" if found.square else printable(found.label))
    ax.set_ylabel(printable(f"throughput, {metric}"))
    return limits, far


def keep_apart(sizes: list[int]) -> list[int]:
    """Those of the sizes whose labels do not overlap on a logarithmic axis; the last is always one."""
    least = TICKS_APART * (math.log2(sizes[-1] / sizes[0]) + 0.3)
    kept = [sizes[-1]]
    for size in reversed(sizes[:-1]):
        if math.log2(kept[-1] / size) >= least:
            kept.append(size)
    return kept[::-1]


def rungs(ax: Axes, names: list[str]) -> None:
    """Rows from the top down, named at the left."""
    ax.set_yticks(range(len(names)), [printable(name) for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")


def plain_ticks(axis: Axis) -> None:
    """0.1, 1, 10, 2 M instead of powers of ten, and on a short logarithmic axis 2 and 5 too."""
    if axis.get_scale() == "log":
        low, high = sorted(axis.get_view_interval())
        axis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: "{:g}{}".format(*scale(value)))
    axis.set_minor_formatter(NullFormatter())
