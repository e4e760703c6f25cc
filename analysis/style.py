"""How every plot looks: on white and on GitHub's dark background alike, each kernel the same everywhere.

Backgrounds are transparent, so nothing may be near black or white. Of all greys, INK's contrast with white (#ffffff)
and with dark (#0d1117) is about the same, above 4:1; every hue has more than 3:1 with both. Within these limits the
hues are far apart in Oklab as seen with normal, protan, deutan and tritan vision (Machado, Oliveira and Fernandes 2009).
Six is as many as stay apart, so what follows the sixth kernel has another marker, and plots name lines where they end.
"""

from __future__ import annotations

import io
import itertools
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.rows import REFERENCE

INK = "#787e87"
HUES = ("#668ffa", "#c28621", "#b02cc0", "#0a8050", "#f245bd", "#d8231a")
NUMBERED, OTHERS = "oD^s", "PvX*"
MARKER_SIZES = {"*": 9.0, "D": 5.5, "P": 7.0, "X": 7.0}  # as large to the eye as a circle of 6
WIDTH = 9.0  # inches; GitHub shows about 830 pixels, so that 10 points of text stay legible
FONT = 10.0
SMALL = 9.0
GAP = 1.3  # line height of neighbouring labels
DPI = 120

matplotlib.use("Agg")
matplotlib.rcdefaults()  # a user's matplotlibrc must not change a byte
matplotlib.rcParams.update(
    {
        "axes.axisbelow": True,
        "axes.edgecolor": INK,
        "axes.grid": True,
        "axes.labelcolor": INK,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "font.size": FONT,
        "grid.alpha": 0.25,
        "grid.color": INK,
        "hatch.linewidth": 0.8,
        "svg.hashsalt": "minfer",
        "text.color": INK,
        "text.parse_math": False,  # a dollar in a kernel's name is a dollar
        "xtick.color": INK,
        "ytick.color": INK,
    }
)


@dataclass(frozen=True)
class Look:
    """What marks a kernel in every plot."""

    color: str
    marker: str
    line: str = "-"

    @property
    def points(self) -> dict[str, Any]:
        """The arguments that draw markers."""
        return {"color": self.color, "marker": self.marker, "markersize": MARKER_SIZES.get(self.marker, 6.0)}


def look(kernel: str) -> Look:
    """A kernel's look, which depends on its name alone, so that no other kernel can change it.

    A numbered version gets that number's; names without a number share theirs by chance, but not with a numbered one.
    """
    if kernel == REFERENCE:
        return Look(INK, "o", "--")
    if numbered := re.match("v([0-9]{1,9})", kernel):
        turn, hue = divmod(int(numbered[1]) - 1, len(HUES))
        return Look(HUES[hue], NUMBERED[turn % len(NUMBERED)])
    turn, hue = divmod(zlib.crc32(kernel.encode()), len(HUES))
    return Look(HUES[hue], OTHERS[turn % len(OTHERS)])


def figure(heights: Sequence[float], columns: Sequence[float] = (1.0,), gap: float = 1.25) -> tuple[Figure, Any]:
    """A figure and its axes [row, column], of these heights in inches and relative widths, `gap` inches between rows.

    Nothing is laid out by what is drawn, so that labels can be placed before it is."""
    tall = sum(heights) + gap * (len(heights) - 1)
    made = Figure(figsize=(WIDTH, tall), dpi=DPI)
    room = {"hspace": gap * len(heights) / sum(heights), "left": 0, "right": 0.82, "top": 1, "bottom": 0}
    ratios = {"height_ratios": heights, "width_ratios": columns}
    axes = made.subplots(len(heights), len(columns), squeeze=False, gridspec_kw=room | ratios | {"wspace": 0.3})
    return made, axes


def title(axes: Axes, text: str, below: str) -> None:
    """A title and, under it, a line on what exactly is shown."""
    axes.set_title(printable(text), loc="left", pad=24, fontsize=FONT + 2, fontweight="bold")
    axes.annotate(printable(below), (0, 1), (0, 9), "axes fraction", "offset points", fontsize=SMALL)


def printable(text: str) -> str:
    """The text in one line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places from `low` on nearest to the wanted ones (least squares) that keep their order and are `gap` apart.

    They end at `high` where that leaves room for all."""
    last = max(low, high - (len(wanted) - 1) * gap)
    order = np.argsort(wanted, kind="stable")
    blocks: list[tuple[float, int]] = []  # mean and length: isotonic regression by pooling adjacent violators
    for rank, index in enumerate(order):
        mean, length = wanted[index] - rank * gap, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean, length = (mean * length + before * count) / (length + count), length + count
        blocks.append((mean, length))
    flat = itertools.chain.from_iterable([min(max(mean, low), last)] * length for mean, length in blocks)
    placed = [0.0] * len(wanted)
    for rank, (index, place) in enumerate(zip(order, flat, strict=True)):
        placed[index] = place + rank * gap
    return placed


def name_ends(axes: Axes, ends: dict[str, tuple[float, float]]) -> None:
    """Name kernels in the right margin, each label led to the kernel's last point. The limits must be set before."""
    low, high = axes.transAxes.transform([(0, 0), (0, 1)])[:, 1]
    wanted = [float(axes.transData.transform(end)[1]) for end in ends.values()]
    gap = GAP * SMALL * DPI / 72
    for (kernel, end), place in zip(ends.items(), spread(wanted, gap, low, high), strict=True):
        style = look(kernel)
        at = (place - low) / (high - low)
        lead = {"arrowstyle": "-", "color": style.color, "linewidth": 0.7, "shrinkA": 4, "shrinkB": 4}
        axes.annotate("", end, (1.05, at), "data", "axes fraction", arrowprops=lead, annotation_clip=False)
        axes.plot([1.05], [at], transform=axes.transAxes, clip_on=False, linestyle="", **style.points)
        axes.annotate(
            printable(kernel), (1.05, at), (7, 0), "axes fraction", "offset points", va="center", fontsize=SMALL
        )


def encoded(drawn: Figure, suffix: str, about: str) -> bytes:
    """The picture as a file's content; the same figure gives the same bytes."""
    metadata = {"Date": None, "Title": printable(about)} if suffix == "svg" else {"Software": None}
    buffer = io.BytesIO()
    drawn.savefig(
        buffer, format=suffix, dpi=DPI, transparent=True, bbox_inches="tight", pad_inches=0.1, metadata=metadata
    )
    return buffer.getvalue()
