"""Throughput, ladder, and cold against steady: each a function from the rows of one op on one device to a picture.

The rows are measured ones, in ladder order, of one metric, maps as dictionaries, and with a `problem`: the case's key
without op and kernel. Any other column may be null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from analysis.readme import counted, scale, scaled, significant
from analysis.rows import REFERENCE, natural, number
from analysis.series import Series, problem, representative, series, setting, words
from analysis.style import INK, SMALL, figure, look, name_ends, printable, title
from minfer.rows.store import Row

MOST_BANDS = 8  # lines whose bands can still be told apart
RUNG = 0.26  # inches of a ladder's rung
TICKS_APART = 0.05  # of an axis: what the label of a size takes
GBPS = "GB/s"


class LeftOut(Exception):
    """There is not enough to draw; the message says what is missing."""


@dataclass
class Picture:
    """A figure, and in words what it shows."""

    figure: Figure
    about: str


def throughput(op: str, device: str, rows: list[Row]) -> Picture:
    """The metric over the sizes of a series of problems, cold; a panel for each dtype and parameters.

    GB/s are on a linear scale, with what copying reaches. Others are on one of square roots: of a ladder from 0.5 to 800
    TFLOP/s a linear one would hide the first rungs and a logarithmic one the differences between the last."""
    settings: dict[str, list[Row]] = {}
    for row in rows:
        if number(row, "cold_rate"):
            settings.setdefault(setting(row), []).append(row)
    shown = {name: found for name, of in settings.items() if (found := series(of))}
    if not shown:
        raise LeftOut("it takes problems of at least two sizes that differ in one axis, or square ones")
    panels: dict[str, dict[str, list[Row]]] = {name: {} for name in shown}
    for name, found in shown.items():
        for row in found.rows:
            panels[name].setdefault(row["kernel"], []).append(row)
    names = fullest_first(panels)
    drawn, axes = figure([max(4.4, 0.9 + 0.2 * len(panels[name])) for name in names])
    for ax, name in zip(axes[:, 0], names, strict=True):
        banded = len(panels[name]) <= MOST_BANDS
        notes = [words(name), shown[name].fixed, "cold", "band: 10th to 90th percentile" if banded else ""]
        over = "size" if shown[name].square else shown[name].label
        title(ax, f"{op} on {device}: throughput over {over}", " · ".join(filter(None, notes)))
        draw_lines(ax, shown[name], panels[name], banded)
    kernels = {kernel for lines in panels.values() for kernel in lines}
    over = " and ".join(dict.fromkeys(shown[name].over for name in names))
    return Picture(drawn, f"Throughput of {counted(len(kernels), 'kernel')} of {op} on {device} over {over}, cold")


def draw_lines(ax: Axes, found: Series, lines: Mapping[str, list[Row]], banded: bool) -> None:
    """A line a kernel over the sizes of a series, on scales that fit."""
    metric, sizes = found.rows[0]["metric"], found.sizes
    copy = latest_peaks(found.rows).get("copy_gbps", 0.0) if metric == GBPS else 0.0
    ends = {
        kernel: draw_line(ax, kernel, sorted(line, key=found.size), found, banded) for kernel, line in lines.items()
    }
    top = 1.05 * max(copy, *(band(row, "cold")[1] for row in found.rows))
    ax.set_xscale("log", base=2)
    ax.set_xlim(sizes[0] / 2**0.15, sizes[-1] * 2**0.15)
    if metric == GBPS:
        ax.set_ylim(0, top)
    else:
        ax.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
        ticks = {rounded(top * (step / 6) ** 2) for step in range(1, 7)}
        ax.set_ylim(0, top)
        ax.set_yticks([0, *sorted(tick for tick in ticks if tick <= top)])
    ticked = apart(sizes)
    ax.set_xticks(ticked, [str(size) for size in ticked])
    ax.minorticks_off()
    plain_ticks(ax.yaxis)
    if copy:
        ax.axhline(copy, color=INK, linewidth=1.1, label="_copy")
        ax.annotate(f"copy {bandwidth(copy)}", (sizes[0], copy), (0, 3), "data", "offset points", fontsize=SMALL)
    ax.set_xlabel(f"side of the square problem, {found.label}" if found.square else printable(found.label))
    ax.set_ylabel(printable(f"throughput, {metric}") + ("" if metric == GBPS else " (square-root scale)"))
    name_ends(ax, ends)


def draw_line(ax: Axes, kernel: str, rows: list[Row], found: Series, banded: bool) -> tuple[float, float]:
    """A kernel's throughput over size, as a line and perhaps a band; the last point."""
    style = look(kernel)
    x, y = [found.size(row) for row in rows], [row["cold_rate"] for row in rows]
    ax.plot(x, y, style.line, linewidth=1.6, label=kernel, zorder=2 + (kernel == REFERENCE), **style.points)
    if banded:
        low, high = zip(*(band(row, "cold") for row in rows), strict=True)
        ax.fill_between(x, low, high, color=style.color, alpha=0.2, linewidth=0)
    return x[-1], y[-1]


def apart(sizes: list[int]) -> list[int]:
    """Those of the sizes whose labels do not overlap on a logarithmic axis; the last is always one."""
    least = TICKS_APART * (math.log2(sizes[-1] / sizes[0]) + 0.3)
    kept = [sizes[-1]]
    for size in reversed(sizes[:-1]):
        if math.log2(kept[-1] / size) >= least:
            kept.append(size)
    return kept[::-1]


def rounded(value: float) -> float:
    """The nearest of 1, 2, 4, 6, 8, 10, 20, ..., which lie well on a scale of square roots."""
    power = 10.0 ** math.floor(math.log10(value))
    return min((digit * power for digit in (1, 2, 4, 6, 8, 10)), key=lambda tick: abs(math.log(tick / value)))


def ladder(op: str, device: str, rows: list[Row]) -> Picture:
    """Kernels of the representative problem as bars in ladder order."""
    rows = representative([row for row in rows if number(row, "cold_rate")])
    if len(rows) < 2:
        raise LeftOut("it takes a problem that two kernels have cold times of")
    drawn, axes = figure([0.3 + RUNG * len(rows)])
    ax = axes[0, 0]
    what = f"{problem(rows[0])} · cold · line: median, pale: 10th to 90th percentile"
    title(ax, f"{op} on {device}: the ladder", what)
    shares = any(number(row, "cold_percent_of_peak") for row in rows)
    limit = 1.03 * max(band(row, "cold")[1] for row in rows)
    metric = rows[0]["metric"]
    texts = [printable(f"{scaled(row['cold_rate'])} {metric}") for row in rows]
    end = max(92.0, 6.5 * max(map(len, texts)))
    for place, row in enumerate(rows):
        rate, color = row["cold_rate"], look(row["kernel"]).color
        low, high = band(row, "cold")
        ax.barh(place, low, 0.72, color=color)
        ax.barh(place, high - low, 0.72, left=low, color=color, alpha=0.4, linewidth=0)
        ax.plot([rate, rate], [place - 0.36, place + 0.36], color=color, linewidth=2, label=row["kernel"])
        ax.plot([high, limit], [place, place], ":", color=INK, linewidth=0.7, zorder=0.5)
        beside(ax, texts[place], place, end)
        if share := number(row, "cold_percent_of_peak"):
            text = f"{significant(share, 3 if share >= 1 else 1)} % of peak"
            texts[place] += f", {text}"
            beside(ax, text, place, end + 80)
        if row["kernel"] == REFERENCE:
            ax.axvline(rate, color=INK, linestyle="--", linewidth=1, zorder=0.5)
    rungs(ax, [row["kernel"] for row in rows])
    ax.set_xlim(0, limit)
    plain_ticks(ax.xaxis)
    ax.set_xlabel(
        printable(f"throughput, {metric}")
        + ("; peak: what the measured peaks allow for this problem" if shares else "")
    )
    bars = "; ".join(f"{row['kernel']} {text}" for row, text in zip(rows, texts, strict=True))
    return Picture(drawn, f"Ladder of {op} on {device}, {problem(rows[0])}, cold: {bars}")


def beside(ax: Axes, text: str, place: float, end: float) -> None:
    """Text in a column at the right of the axes that ends that many points from them."""
    ax.annotate(
        text, (1, place), (end, 0), ax.get_yaxis_transform(), "offset points", ha="right", va="center", fontsize=SMALL
    )


def cold_steady(op: str, device: str, rows: list[Row]) -> Picture:
    """Cold and steady side by side as measured, with the clock that the device settled at; kernels, then PyTorch over a
    series of sizes. A kernel's two are of one moment, and their ratio is its own; between kernels the card's clock differs."""
    rows = [row for row in rows if number(row, "cold_rate") and number(row, "steady_rate")]
    kernels = representative(rows)
    if not kernels:
        raise LeftOut("no row has both a cold and a steady time")
    groups = [
        (kernels, [row["kernel"] for row in kernels], f"{op} on {device}: cold against steady", problem(kernels[0]))
    ]
    if sizes := series(r for r in rows if r["kernel"] == REFERENCE and setting(r) == setting(kernels[0])):
        ordered = sorted(sizes.rows, key=sizes.size)
        names = [f"{sizes.label} = {sizes.size(row)}" for row in ordered]
        what = " · ".join(filter(None, [words(setting(kernels[0])), sizes.fixed]))
        groups.append((ordered, names, f"{REFERENCE} over {'square sizes' if sizes.square else sizes.label}", what))
    clocks = any(number(row, "sm_mhz") for group, *_ in groups for row in group)
    drawn, axes = figure([0.3 + 1.5 * RUNG * len(group) for group, *_ in groups], (2.2, 1) if clocks else (1,))
    for row_axes, (group, names, head, what) in zip(axes, groups, strict=True):
        title(row_axes[0], head, f"{what} · solid: cold, pale: steady, both as measured")
        bars(row_axes[0], group, names)
        if clocks:
            clock_panel(row_axes[1], group)
    for column in axes.T:  # the same scale from top to bottom
        limits = [ax.get_xlim() for ax in column]
        for ax in column:
            ax.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
    said = ", ".join(f"{r['kernel']} {scaled(r['cold_rate'])} and {scaled(r['steady_rate'])}" for r in kernels)
    metric = kernels[0]["metric"]
    return Picture(drawn, f"Cold and steady {metric} as measured of {op} on {device}, {problem(kernels[0])}: {said}")


def bars(ax: Axes, rows: list[Row], names: list[str]) -> None:
    """Two bars a row; the steady one says how far it is from the cold one."""
    for place, row in enumerate(rows):
        color = look(row["kernel"]).color
        cold, steady = row["cold_rate"], row["steady_rate"]
        ax.barh(place - 0.2, cold, 0.36, color=color, label="cold")
        ax.barh(place + 0.2, steady, 0.36, facecolor=(color, 0.3), edgecolor=color, linewidth=1, label="steady")
        change = f"{scaled(steady)} ({100 * (steady / cold - 1):+.1f} %)".replace("-", "−")
        for end, text, shift in ((cold, scaled(cold), -0.2), (steady, change, 0.2)):
            ax.annotate(text, (end, place + shift), (4, 0), "data", "offset points", va="center", fontsize=SMALL)
    rungs(ax, names)
    ax.set_xlim(0, 1.25 * max(row[f"{regime}_rate"] for row in rows for regime in ("cold", "steady")))
    plain_ticks(ax.xaxis)
    ax.set_xlabel(printable(f"throughput, {rows[0]['metric']}"))


def clock_panel(ax: Axes, rows: list[Row]) -> None:
    """The SM clock of each row, and why it is lowered where it is."""
    shown = [(place, row) for place, row in enumerate(rows) if number(row, "sm_mhz")]
    for place, row in shown:
        ax.plot([row["sm_mhz"]], [place], linestyle="", label="sm_mhz", **look(row["kernel"]).points)
        text = f"{row['sm_mhz']:.0f}" + (f" {row['throttle']}" if row["throttle"] else "")
        ax.annotate(
            printable(text), (row["sm_mhz"], place), (7, 0), "data", "offset points", va="center", fontsize=SMALL
        )
    rungs(ax, [""] * len(rows))
    low, high = min((r["sm_mhz"] for _, r in shown), default=0), max((r["sm_mhz"] for _, r in shown), default=1)
    ax.set_xlim(low - 0.15 * (high - low) - 50, high + 0.15 * (high - low) + 50)
    ax.set_xlabel("SM clock while steady, MHz")


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


def fullest_first(panels: Mapping[str, Sized]) -> list[str]:
    """The names of panels, those with the most in them first: that is what a reader came for."""
    return sorted(panels, key=lambda name: (-len(panels[name]), natural(name)))


def band(row: Row, regime: str) -> tuple[float, float]:
    """The throughput at the 90th and the 10th percentile of the times; the median's twice where they are not known."""
    slow, fast, us = (number(row, f"{regime}_{name}") for name in ("p90_us", "p10_us", "us"))
    rate: float = row[f"{regime}_rate"]
    return (rate * us / slow, rate * us / fast) if slow and fast and us else (rate, rate)


def latest_peaks(rows: Iterable[Row]) -> dict[str, float]:
    """The peaks of the newest row that has any."""
    known = [row for row in rows if row["peaks"]]
    peaks = max(known, key=lambda row: str(row["finished"]))["peaks"] if known else {}
    return {name: value for name, value in peaks.items() if value and 0 < value < math.inf}


def bandwidth(gbps: float) -> str:
    return f"{significant(gbps, 3)} GB/s" if gbps < 1000 else f"{significant(gbps / 1e3, 3)} TB/s"
