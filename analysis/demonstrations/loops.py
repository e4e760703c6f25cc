"""The picture and the table of `examples/llvm_fusion.py`: two loops of LLVM's IR, and both in one."""

from __future__ import annotations

import numpy as np

from minfer.analysis.plots.every_op import Picture
from minfer.analysis.plots.style import LIGHT, SMALL, Theme, figure, printable, title
from minfer.analysis.tables.markdown import format_scaled, significant, table_lines
from minfer.rows.store import Row

OPERANDS = 5 / 3  # that two loops move, over those that the fused one moves
CALLS = 2.0  # of two loops, over one


def loops(rows: list[Row], device: str, theme: Theme = LIGHT) -> Picture:
    """How many times as fast the fused loop is, by the number of elements, and what was predicted."""
    drawn, (ax,) = figure([2.4])
    title(ax, f"Two loops and one on {device}", "y = αa + b in one thread; float32")
    places = range(len(rows))
    for at, text in ((CALLS, "half the calls"), (OPERANDS, "3 operands for 5")):
        ax.axhline(at, color=theme.muted, linestyle=":", linewidth=1.2)
        ax.annotate(text, (1, at), (6, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=SMALL)
    ax.axhline(1, color=theme.torch, linewidth=1)
    for place, row in zip(places, rows, strict=True):
        ax.plot((place, place), (row["low"], row["high"]), color=theme.ours, linewidth=2)
    ax.plot(places, [row["speedup"] for row in rows], "o-", color=theme.ours, linewidth=1)
    ax.set_xticks(places, [format_scaled(row["elements"]) for row in rows], fontsize=SMALL)
    ax.set_ylim(0, 1.1 * max(CALLS, *(row["high"] for row in rows)))
    ax.set_ylabel("times as fast as two")
    ax.set_xlabel("elements; bars are 95 % intervals of the median of paired rounds")
    ends = f"{rows[0]['speedup']:.2f} at {rows[0]['elements']} elements and {rows[-1]['speedup']:.2f}"
    about = f"The fused loop on {device} is {ends} at {rows[-1]['elements']} times as fast as two loops."
    return Picture(drawn, printable(about))


def loop_lines(rows: list[Row]) -> list[str]:
    """A table with a line for each number of elements."""
    body = []
    for row in rows:
        times = []
        for name in ("two_us", "fused_us"):
            low, middle, high = (significant(float(each), 3) for each in np.percentile(row[name], (25, 50, 75)))
            times.append(f"{middle} ({low}–{high})")
        ratio = f"{row['speedup']:.2f} ({row['low']:.2f}–{row['high']:.2f}) {row['verdict']}"
        body.append([str(row["elements"]), *times, ratio, f"{100 * row['aa_spread']:.1f} %"])
    header = ["Elements", "Two loops (µs, p25–p75)", "Fused (µs, p25–p75)", "Times as fast", "A/A"]
    return [
        *table_lines(header, ["--:", "--:", "--:", ":--", "--:"], body),
        "",
        f"{rows[0]['rounds']} rounds; LLVM {rows[0]['llvm']}. A/A: how far the two loops, timed a second time in each round, "
        "may differ from themselves.",
    ]
