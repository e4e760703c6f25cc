"""Throughput, ladder, and cold against steady: each a function from the rows of one op on one device to a picture.

The rows are measured ones, in ladder order, maps as dictionaries, and with a `problem`: the case's key without op and
kernel. Any other column may be null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from analysis.readme import counted, significant
from analysis.rows import MANY, REFERENCE, natural, number
from analysis.style import INK, SMALL, figure, look, name_ends, printable, title
from minfer.rows.store import Row

MOST_BANDS = 8  # lines whose bands can still be told apart
RUNG = 0.26  # inches of a ladder's rung


class LeftOut(Exception):
    """There is not enough to draw; the message says what is missing."""


@dataclass
class Picture:
    """A figure, and in words what it shows."""

    figure: Figure
    about: str


def throughput(op: str, device: str, rows: list[Row]) -> Picture:
    """TFLOP/s over the size of square problems, cold; a panel for each dtype and parameters.

    The scale is that of square roots: of a ladder from 0.5 to 800 TFLOP/s a linear one would hide the first rungs and a
    logarithmic one the differences between the last."""
    panels: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if side(row) and number(row, "cold_tflops"):
            panels.setdefault(setting(row), {}).setdefault(row["kernel"], []).append(row)
    sizes = {name: sorted({side(r) or 0 for line in lines.values() for r in line}) for name, lines in panels.items()}
    panels = {name: panels[name] for name in fullest_first(panels) if len(sizes[name]) > 1}
    if not panels:
        raise LeftOut("it takes square problems of at least two sizes")
    drawn, axes = figure([max(4.4, 0.9 + 0.2 * len(lines)) for lines in panels.values()])
    for ax, (name, lines) in zip(axes[:, 0], panels.items(), strict=True):
        banded = len(lines) <= MOST_BANDS
        what = f"{words(name)} · cold" + (" · band: 10th to 90th percentile" if banded else "")
        title(ax, f"{op} on {device}: throughput over size", what)
        ends = {kernel: draw_line(ax, kernel, line, banded) for kernel, line in lines.items()}
        ax.set_xscale("log", base=2)
        ax.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
        top = 1.05 * max(band(row, "cold")[1] for line in lines.values() for row in line)
        ticks = {rounded(top * (step / 6) ** 2) for step in range(1, 7)}
        ax.set_xlim(sizes[name][0] / 2**0.15, sizes[name][-1] * 2**0.15)
        ax.set_ylim(0, top)
        ax.set_xticks(sizes[name], [str(size) for size in sizes[name]])
        ax.set_yticks([0, *sorted(tick for tick in ticks if tick <= top)])
        ax.minorticks_off()
        plain_ticks(ax.yaxis)
        ax.set_xlabel("side of the square problem, " + " = ".join(next(iter(lines.values()))[0]["shape"]))
        ax.set_ylabel("throughput, TFLOP/s (square-root scale)")
        name_ends(ax, ends)
    kernels = {kernel for lines in panels.values() for kernel in lines}
    return Picture(
        drawn,
        f"Throughput of {counted(len(kernels), 'kernel')} of {op} on {device} over the size of square problems, cold",
    )


def draw_line(ax: Axes, kernel: str, rows: list[Row], banded: bool) -> tuple[float, float]:
    """A kernel's throughput over size, as a line and perhaps a band; the last point."""
    rows = sorted(rows, key=lambda row: side(row) or 0)
    style = look(kernel)
    x, y = [side(row) or 0 for row in rows], [row["cold_tflops"] for row in rows]
    ax.plot(x, y, style.line, linewidth=1.6, label=kernel, zorder=2 + (kernel == REFERENCE), **style.points)
    if banded:
        low, high = zip(*(band(row, "cold") for row in rows), strict=True)
        ax.fill_between(x, low, high, color=style.color, alpha=0.2, linewidth=0)
    return x[-1], y[-1]


def rounded(value: float) -> float:
    """The nearest of 1, 2, 4, 6, 8, 10, 20, ..., which lie well on a scale of square roots."""
    power = 10.0 ** math.floor(math.log10(value))
    return min((digit * power for digit in (1, 2, 4, 6, 8, 10)), key=lambda tick: abs(math.log(tick / value)))


def ladder(op: str, device: str, rows: list[Row]) -> Picture:
    """Kernels of the representative problem as bars in ladder order."""
    rows = representative([row for row in rows if number(row, "cold_tflops")])
    if len(rows) < 2:
        raise LeftOut("it takes a problem that two kernels have cold times of")
    drawn, axes = figure([0.3 + RUNG * len(rows)])
    ax = axes[0, 0]
    what = f"{problem(rows[0])} · cold · line: median, pale: 10th to 90th percentile"
    title(ax, f"{op} on {device}: the ladder", what)
    shares = any(number(row, "cold_percent_of_peak") for row in rows)
    limit = 1.03 * max(band(row, "cold")[1] for row in rows)
    texts = []
    for place, row in enumerate(rows):
        tflops, color = row["cold_tflops"], look(row["kernel"]).color
        low, high = band(row, "cold")
        ax.barh(place, low, 0.72, color=color)
        ax.barh(place, high - low, 0.72, left=low, color=color, alpha=0.4, linewidth=0)
        ax.plot([tflops, tflops], [place - 0.36, place + 0.36], color=color, linewidth=2, label=row["kernel"])
        ax.plot([high, limit], [place, place], ":", color=INK, linewidth=0.7, zorder=0.5)
        texts.append(f"{significant(tflops)} TFLOP/s")
        beside(ax, texts[-1], place, 92)
        if share := number(row, "cold_percent_of_peak"):
            texts[-1] += f", {significant(share, 3 if share >= 1 else 1)} % of peak"
            beside(ax, texts[-1].partition(", ")[2], place, 172)
        if row["kernel"] == REFERENCE:
            ax.axvline(tflops, color=INK, linestyle="--", linewidth=1, zorder=0.5)
    rungs(ax, [row["kernel"] for row in rows])
    ax.set_xlim(0, limit)
    ax.set_xlabel("throughput, TFLOP/s" + ("; peak: what the measured peaks allow for this problem" if shares else ""))
    bars = "; ".join(f"{row['kernel']} {text}" for row, text in zip(rows, texts, strict=True))
    return Picture(drawn, f"Ladder of {op} on {device}, {problem(rows[0])}, cold: {bars}")


def beside(ax: Axes, text: str, place: float, end: float) -> None:
    """Text in a column at the right of the axes that ends that many points from them."""
    ax.annotate(
        text, (1, place), (end, 0), ax.get_yaxis_transform(), "offset points", ha="right", va="center", fontsize=SMALL
    )


def cold_steady(op: str, device: str, rows: list[Row]) -> Picture:
    """Cold and steady side by side as measured, with the clock that the device settled at; kernels, then PyTorch over
    sizes. A kernel's two are of one moment, and their ratio is its own; between kernels the card's clock differs."""
    rows = [row for row in rows if number(row, "cold_tflops") and number(row, "steady_tflops")]
    kernels = representative(rows)
    if not kernels:
        raise LeftOut("no row has both a cold and a steady time")
    sizes = [r for r in rows if r["kernel"] == REFERENCE and side(r) and setting(r) == setting(kernels[0])]
    sizes.sort(key=lambda row: side(row) or 0)
    groups = [
        (kernels, [row["kernel"] for row in kernels], f"{op} on {device}: cold against steady", problem(kernels[0]))
    ]
    if len(sizes) > 1:
        axis = " = ".join(sizes[0]["shape"])
        names = [f"{axis} = {side(row)}" for row in sizes]
        groups.append((sizes, names, f"{REFERENCE} over square sizes", words(setting(sizes[0]))))
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
    said = ", ".join(
        f"{r['kernel']} {significant(r['cold_tflops'])} and {significant(r['steady_tflops'])}" for r in kernels
    )
    return Picture(drawn, f"Cold and steady TFLOP/s as measured of {op} on {device}, {problem(kernels[0])}: {said}")


def bars(ax: Axes, rows: list[Row], names: list[str]) -> None:
    """Two bars a row; the steady one says how far it is from the cold one."""
    for place, row in enumerate(rows):
        color = look(row["kernel"]).color
        cold, steady = row["cold_tflops"], row["steady_tflops"]
        ax.barh(place - 0.2, cold, 0.36, color=color, label="cold")
        ax.barh(place + 0.2, steady, 0.36, facecolor=(color, 0.3), edgecolor=color, linewidth=1, label="steady")
        change = f"{significant(steady)} ({100 * (steady / cold - 1):+.1f} %)".replace("-", "−")
        for end, text, shift in ((cold, significant(cold), -0.2), (steady, change, 0.2)):
            ax.annotate(text, (end, place + shift), (4, 0), "data", "offset points", va="center", fontsize=SMALL)
    rungs(ax, names)
    ax.set_xlim(0, 1.25 * max(row[f"{regime}_tflops"] for row in rows for regime in ("cold", "steady")))
    ax.set_xlabel("throughput, TFLOP/s")


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
    """0.1, 1, 10 instead of powers of ten, and on a short logarithmic axis 2 and 5 too."""
    if axis.get_scale() == "log":
        low, high = sorted(axis.get_view_interval())
        axis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def fullest_first(panels: Mapping[str, Sized]) -> list[str]:
    """The names of panels, those with the most in them first: that is what a reader came for."""
    return sorted(panels, key=lambda name: (-len(panels[name]), natural(name)))


def setting(row: Row) -> str:
    """A problem's dtype and parameters: `float16/layout=TN,accumulate=float32`."""
    return row["problem"].rpartition("/")[0]


def words(text: str) -> str:
    return printable(" · ".join(part.replace(",", ", ") for part in text.split("/") if part))


def problem(row: Row) -> str:
    """A row's problem in words, `m=n=k=512` where all sides are equal."""
    if length := side(row):
        return f"{words(setting(row))} · {'='.join(row['shape'])}={length}"
    return words(row["problem"])


def side(row: Row) -> int | None:
    """The length of a square problem's sides; None of any other."""
    lengths = set((row["shape"] or {}).values())
    length = lengths.pop() if len(lengths) == 1 else None
    return length if length and length > 0 else None


def band(row: Row, regime: str) -> tuple[float, float]:
    """TFLOP/s at the 90th and the 10th percentile of the times; the median's twice where they are not known."""
    slow, fast, flops = number(row, f"{regime}_p90_us"), number(row, f"{regime}_p10_us"), number(row, "flops")
    if not (slow and fast and flops):
        return row[f"{regime}_tflops"], row[f"{regime}_tflops"]
    return flops / slow / 1e6, flops / fast / 1e6


def representative(rows: list[Row]) -> list[Row]:
    """The rows of one problem: of those that many kernels have the largest; a square if there is any."""
    problems: dict[str, list[Row]] = {}
    for row in [row for row in rows if side(row)] or rows:
        problems.setdefault(row["problem"], []).append(row)
    many = MANY * max(map(len, problems.values()), default=0)

    def rank(name: str) -> tuple[object, ...]:
        return -(number(problems[name][0], "flops") or 0), -len(problems[name]), natural(name)

    full = [name for name, found in problems.items() if len(found) >= many]
    return problems[min(full, key=rank)] if full else []
