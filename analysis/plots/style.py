"""The style of all plots. A plot is drawn with LIGHT; on a dark page a style sheet in its SVG replaces the colours by DARK's.

Colours say what a line is: OURS, our fastest kernel; PyTorch; up to three more rungs; the rest in one grey. Each theme has
them on its own background, text with a contrast of at least 7:1 and lines of at least 3:1 (WCAG 2), greys aside. Lines are
named where they end, so that nothing depends on colour alone.
"""

from __future__ import annotations

import io
import itertools
import re
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minfer.analysis.data.prepare import REFERENCE

WIDTH = 8.3  # inches; GitHub shows about 830 pixels, so that 10 points of text stay legible
FONT = 10.0
SMALL = 9.0
GAP = 1.3  # line height of neighbouring labels
NEAR_MARGIN = 0.95  # of the width of the axes: a lead from there is short
DPI = 100
HUES = ("#668ffa", "#c28621", "#b02cc0", "#0a8050", "#f245bd", "#d8231a")  # of kernels in the report, on light and dark
NUMBERED, OTHERS = "oD^s", "PvX*"
MARKER_SIZES = {"*": 9.0, "D": 5.5, "P": 7.0, "X": 7.0}  # as large to the eye as a circle of 6


@dataclass(frozen=True)
class Theme:
    """The colours of one background."""

    paper: str
    ink: str
    muted: str  # ticks, notes, roofs
    grid: str
    others: str  # what is there for comparison only
    ours: str
    pale: str  # rungs of the ladder that are not the fastest: a tint of `ours`
    torch: str
    rungs: tuple[str, ...]  # hues of three more rungs

    @property
    def colors(self) -> tuple[str, ...]:
        """All colours, in the order of the fields."""
        return (*astuple(self)[:-1], *self.rungs)


LIGHT = Theme(
    "#ffffff", "#1f2328", "#59636e", "#e3e7eb", "#c6ccd2", "#0b5fc4", "#a8cbf3", "#c2500a",
    ("#0f7b62", "#8a3ffc", "#b3196f"),
)  # fmt: skip
DARK = Theme(
    "#0d1117", "#e6edf3", "#9da7b3", "#262c34", "#59636f", "#58a6ff", "#274a75", "#f0883e",
    ("#3fc296", "#b794ff", "#ff7ab8"),
)  # fmt: skip
COUNTERPARTS = dict(zip(LIGHT.colors, DARK.colors, strict=True))

matplotlib.use("Agg")
matplotlib.rcdefaults()  # so that a user's matplotlibrc does not change the plots
matplotlib.rcParams.update(
    {
        "axes.axisbelow": True,
        "axes.edgecolor": LIGHT.muted,
        "axes.facecolor": LIGHT.paper,
        "axes.grid": True,
        "axes.labelcolor": LIGHT.ink,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.facecolor": LIGHT.paper,
        "font.size": FONT,
        "grid.color": LIGHT.grid,
        "grid.linewidth": 0.6,
        "svg.fonttype": "none",  # text, not outlines: a seventh of the bytes, and it can be searched
        "svg.hashsalt": "minfer",
        "text.color": LIGHT.ink,
        "text.parse_math": False,  # a dollar in a kernel's name is a dollar
        "xtick.color": LIGHT.muted,
        "xtick.labelcolor": LIGHT.ink,
        "ytick.color": LIGHT.muted,
        "ytick.labelcolor": LIGHT.ink,
    }
)


@dataclass(frozen=True)
class Look:
    """What marks a kernel in the interactive report, where every kernel has a mark of its own."""

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
        return Look(LIGHT.muted, "o", "--")
    if numbered := re.match("v([0-9]{1,9})", kernel):
        turn, hue = divmod(int(numbered[1]) - 1, len(HUES))
        return Look(HUES[hue], NUMBERED[turn % len(NUMBERED)])
    turn, hue = divmod(zlib.crc32(kernel.encode()), len(HUES))
    return Look(HUES[hue], OTHERS[turn % len(OTHERS)])


def figure(heights: Sequence[float], gap: float = 1.2, right: float = 0.8) -> tuple[Figure, list[Axes]]:
    """A figure and its axes below each other, of these heights in inches, `gap` inches between them, which leave the part
    beyond `right` of the width to labels.

    Nothing is laid out by what is drawn, so that labels can be placed before it is."""
    tall = sum(heights) + gap * (len(heights) - 1)
    made = Figure(figsize=(WIDTH, tall), dpi=DPI)
    room = {"hspace": gap * len(heights) / sum(heights), "left": 0, "right": right, "top": 1, "bottom": 0}
    axes = made.subplots(len(heights), 1, squeeze=False, gridspec_kw=room | {"height_ratios": heights})
    return made, list(axes[:, 0])


def title(axes: Axes, text: str, below: str, width: int = 96) -> None:
    """A title and, under it, on lines of at most so many characters, what exactly is shown."""
    lines = textwrap.wrap(printable(below), width)
    pad = 24 + 13 * max(0, len(lines) - 1)
    axes.set_title(printable(text), loc="left", pad=pad, fontsize=FONT + 2, fontweight="bold")
    axes.annotate("\n".join(lines), (0, 1), (0, 9), "axes fraction", "offset points", fontsize=SMALL, linespacing=1.3)


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


def name_ends(axes: Axes, ends: Mapping[str, tuple[float, float]], colors: Mapping[str, str]) -> None:
    """Name lines in the right margin in their colour, each label led to its line's last point, by dots where that point is far
    from the margin, so that nobody takes the lead for a line of measured points. The limits must be set before."""
    low, high = axes.transAxes.transform([(0, 0), (0, 1)])[:, 1]
    wanted = [float(axes.transData.transform(end)[1]) for end in ends.values()]
    gap = GAP * SMALL * DPI / 72
    for (name, end), place in zip(ends.items(), spread(wanted, gap, low, high), strict=True):
        at = (place - low) / (high - low)
        lead: dict[str, Any] = {"arrowstyle": "-", "color": colors[name], "linewidth": 0.7, "shrinkA": 2, "shrinkB": 5}
        if axes.transAxes.inverted().transform(axes.transData.transform(end))[0] < NEAR_MARGIN:
            lead["linestyle"] = (0, (1, 4))
        axes.annotate("", end, (1.04, at), "data", "axes fraction", arrowprops=lead, annotation_clip=False)
        text: dict[str, Any] = {"color": colors[name], "va": "center", "fontsize": SMALL, "fontweight": "bold"}
        axes.annotate(printable(name), (1.04, at), (2, 0), "axes fraction", "offset points", **text)


def name_levels(axes: Axes, levels: Mapping[str, float], color: str) -> None:
    """Name horizontal lines in the right margin, apart from each other. The limits must be set before."""
    low, high = axes.transAxes.transform([(0, 0), (0, 1)])[:, 1]
    wanted = [float(axes.transData.transform((1, level))[1]) for level in levels.values()]
    gap = GAP * SMALL * DPI / 72
    for name, place in zip(levels, spread(wanted, gap, low, high), strict=True):
        at = (1, (place - low) / (high - low))
        axes.annotate(
            printable(name), at, (4, 0), "axes fraction", "offset points", va="center", fontsize=SMALL, color=color
        )


def encoded(drawn: Figure, about: str) -> bytes:
    """The picture as an SVG, light or dark as its reader's browser asks; the same figure gives the same bytes.

    Raises ValueError if it has a colour that is not in LIGHT."""
    buffer = io.BytesIO()
    metadata = {"Date": None, "Title": printable(about)}
    drawn.savefig(buffer, format="svg", dpi=DPI, bbox_inches="tight", pad_inches=0.15, metadata=metadata)
    before, end, after = buffer.getvalue().decode().partition("</style>")
    return f"{before}\n{dark_rules(after)}  {end}{after}".encode()


def dark_rules(svg: str) -> str:
    """CSS that replaces each LIGHT colour of a drawing by its DARK counterpart if the browser prefers dark pages.

    Programs without this preference show the drawing's own colours. These are in `style` attributes, which only an
    `!important` rule overrides. Raises ValueError on any other colour."""
    used = sorted(set(re.findall("(fill|stroke): (#[0-9a-f]{6})", svg)))
    if unknown := sorted({color for _, color in used} - set(COUNTERPARTS)):
        raise ValueError(f"{', '.join(unknown)} has no counterpart on dark pages: draw with the colours of a Theme")
    rules = [f'[style*="{what}: {color}"] {{ {what}: {COUNTERPARTS[color]} !important }}\n' for what, color in used]
    return "".join(["@media (prefers-color-scheme: dark) {\n", *rules, "}\n"])
