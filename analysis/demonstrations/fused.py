"""The picture and the table of `benchmarks/fusion.py`: a decoder layer, eager, by inductor, and fused."""

from __future__ import annotations

import numpy as np

from minfer.analysis.plots.every_op import Picture
from minfer.analysis.plots.style import LIGHT, SMALL, Theme, figure, printable, title
from minfer.analysis.tables.markdown import escape, significant, table_lines
from minfer.rows.store import Row

BAR = 0.24  # inches


def shape_of(row: Row) -> str:
    """Prefill of so many sequences and tokens, or decode behind so many that are cached."""
    cached = f", {row['past']} cached" if row["past"] else ""
    return f"{row['shape']} {row['batch']} × {row['seq']}{cached}"


def fused(rows: list[Row], device: str, theme: Theme = LIGHT) -> Picture:
    """Bars by shape and way: how many times as fast as inductor, with the interval of the ratio's median."""
    drawn, (ax,) = figure([0.3 + BAR * len(rows)], right=0.9)
    about = rows[0]
    title(ax, f"A Llama layer on {device}", f"{about['dim']} wide, {about['hidden']} hidden, {about['dtype']}")
    colors = {"eager": theme.others, "inductor": theme.torch, "minfer": theme.ours}
    for place, row in enumerate(rows):
        ax.barh(place, row["speedup"], 0.7, color=colors[row["way"]])
        ax.plot((row["low"], row["high"]), (place, place), color=theme.ink, linewidth=1.2)
        text = f"{row['speedup']:.2f}, {significant(row['us'], 3)} µs"
        ax.annotate(text, (row["high"], place), (4, 0), "data", "offset points", va="center", fontsize=SMALL)
    ax.set_yticks(range(len(rows)), [printable(f"{shape_of(row)} · {row['way']}") for row in rows], fontsize=SMALL)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, 1.2 * max(row["high"] for row in rows))
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("times as fast as inductor in the same round, cold: median and its 95 % interval")
    ours = [f"{shape_of(row)} {row['speedup']:.3f}" for row in rows if row["way"] == "minfer"]
    return Picture(drawn, printable(f"Time of a Llama layer on {device}; fused over inductor: {'; '.join(ours)}."))


def fused_lines(rows: list[Row]) -> list[str]:
    """A table: a line for each shape and way."""
    body = []
    for row in rows:
        low, high = np.percentile(row["samples_us"], (25, 75))
        launches = "—" if row["launches"] is None else str(row["launches"])
        time = f"{significant(row['us'], 3)} ({significant(float(low), 3)}–{significant(float(high), 3)})"
        ratio = f"{row['speedup']:.3f} ({row['low']:.3f}–{row['high']:.3f}) {row['verdict']}" if row["verdict"] else "—"
        cells = [
            shape_of(row),
            row["way"],
            launches,
            str(row["calls"]),
            significant(row["bytes"] / 1e6, 3),
            time,
            ratio,
        ]
        body.append([*cells, escape(", ".join(row["fused"]))])
    header = ["Shape", "Way", "Launches", "Calls", "MB", "µs (p25–p75)", "Times as fast as inductor", "Fused"]
    spread = max(row["aa_spread"] for row in rows)
    return [
        *table_lines(header, [":--", ":--", *["--:"] * 4, ":--", ":--"], body),
        "",
        f"Inductor, timed a second time in each round, differs from itself by up to {100 * spread:.1f} %.",
    ]
