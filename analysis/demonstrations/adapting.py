"""The picture and the tables of `benchmarks/specialise.py`: what adapting costs a call, what it gains by length, and when."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes

from minfer.analysis.plots.every_op import Picture
from minfer.analysis.plots.style import LIGHT, SMALL, Theme, figure, name_ends, printable, title
from minfer.analysis.tables.markdown import escape, format_scaled, significant, table_lines
from minfer.rows.store import Row

LENGTHS = {
    "uniform": "uniform lengths",
    "zipf": "lengths by Zipf's law",
    "drift": "lengths by Zipf's law, and others come most from half-way on",
}
PARTS = {
    "monitor": "`monitor(size)`",
    "table": "the table",
    "execute": "`execute(size)` of what does nothing",
    "call": "the same, called without it",
}


def select_kind(rows: list[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def rate(row: Row, way: str) -> np.ndarray:
    """Tokens a second of each round."""
    return np.array(row["tokens"]) / np.array(row[f"{way}_s"])


def over_generic(row: Row, way: str) -> list[tuple[float, float]]:
    """How many times as fast as generic a way was over the seconds: medians over windows of a fortieth of the trace."""
    at, edges = np.array(row["at"]), np.linspace(0, row["seconds"], 41)
    ratio = rate(row, way) / rate(row, "generic")
    found = [((low + high) / 2, ratio[(at >= low) & (at < high)]) for low, high in pairwise(edges)]
    return [(middle, float(np.median(within))) for middle, within in found if len(within)]


def adapting(rows: list[Row], device: str, theme: Theme = LIGHT) -> Picture:
    """A panel for each trace, on one scale: the speed of `adaptive` and of the control over that of `generic`, as it served."""
    found = select_kind(rows, "trace")
    drawn, axes = figure([1.7] * len(found), gap=1.0, right=0.87)
    colors = {"generic again": theme.torch, "adaptive": theme.ours}
    ways = {"generic again": "again", "adaptive": "adaptive"}
    lines = [{name: over_generic(row, way) for name, way in ways.items()} for row in found]
    values = [value for panel in lines for line in panel.values() for _, value in line]
    low, high = min(values), max(values)
    for ax, row, panel in zip(axes, found, lines, strict=True):
        title(ax, f"seq_sum on {device}: {row['trace']}", f"{LENGTHS[row['trace']]}; {row['budget']} variants at most")
        ax.axhline(1, color=theme.muted, linewidth=1)
        for way, line in panel.items():
            ax.plot(*zip(*line, strict=True), color=colors[way], linewidth=2 if way == "adaptive" else 1.2)
        # Above the lines there is room for the numbers of variants.
        ax.set(xlim=(0, row["seconds"]), ylim=(low - 0.1 * (high - low), high + 0.3 * (high - low)))
        ax.set_ylabel("times as fast as generic")
        if row["trace"] == "drift":
            ax.axvline(row["seconds"] / 2, ymax=0.85, color=theme.muted, linestyle=":", linewidth=1.2)
        moments(ax, row, theme)
        name_ends(ax, {name: line[-1] for name, line in panel.items()}, colors)
    axes[-1].set_xlabel("seconds; at the top of each panel: how many variants are in use from there on")
    quarter = ", ".join(f"{row['trace']} {row['speedup']:.3f}" for row in found)
    about = (
        f"How many times as fast as generic seq_sum is on {device} while variants are compiled; in the last quarter: "
    )
    return Picture(drawn, printable(f"{about}{quarter}."))


def moments(ax: Axes, row: Row, theme: Theme) -> None:
    """A short line where the number of variants in use changed, and the number where there is room for its two digits."""
    last = -1.0
    for at, before, now in zip(row["at"][1:], row["variants"], row["variants"][1:], strict=False):
        if before != now:
            ax.axvline(at, ymin=0.95, color=theme.ours, linewidth=1)
            if at - last > row["seconds"] / 33:
                place, color = ("data", "axes fraction"), theme.ours
                ax.annotate(str(now), (at, 1), (3, -2), place, "offset points", va="top", color=color, fontsize=SMALL)
                last = at


def adapting_lines(rows: list[Row]) -> list[str]:
    """The tables, and how busy the machine was."""
    loads = [row["load"] for row in rows]
    busy = f"The load average was {min(loads):.1f} to {max(loads):.1f} while all this was measured."
    return [busy, "", *cost_lines(rows), "", *gain_lines(rows), "", *trace_lines(rows)]


def cost_lines(rows: list[Row]) -> list[str]:
    """A table of nanoseconds, and what monitoring and dispatch add to a call."""
    ns = {row["what"]: np.array(row["ns"]) for row in select_kind(rows, "cost")}
    samples = {PARTS[name]: ns[name] for name in PARTS} | {
        "monitoring and dispatch, round by round": ns["execute"] - ns["call"]
    }
    body = [
        [name, *(f"{float(np.percentile(each, part)):.0f}" for part in (50, 10, 90))] for name, each in samples.items()
    ]
    rounds = len(ns["call"])
    return [
        f"**What a call costs**, in nanoseconds, over {rounds} rounds:",
        "",
        *table_lines(["Part", "Median", "p10", "p90"], [":--", "--:", "--:", "--:"], body),
    ]


def gain_lines(rows: list[Row]) -> list[str]:
    """A table with a line for each variant that was tried by itself."""
    body = []
    for row in select_kind(rows, "gain"):
        ratio = f"{row['speedup']:.2f} ({row['low']:.2f}–{row['high']:.2f})" if row["speedup"] else "—"
        times = [significant(row[name], 3) if row[name] else "—" for name in ("generic_us", "variant_us")]
        took = [significant(row[name], 2) if row[name] else "—" for name in ("compile_s", "trial_s")]
        paid = [paid_after(row, row["compile_s"]), paid_after(row, row["compile_s"] + row["trial_s"])]
        sizes = row.get("sizes") or f"longest {row['length']}"
        body.append([escape(row["recipe"]), sizes, row["status"], *times, ratio, *took, *paid, str(row["bytes"])])
    header = ["Recipe", "Sizes", "Outcome", "Generic (µs)", "Variant (µs)", "Times as fast", "Compile (s)", "Trial (s)"]
    header += ["Calls that pay for the compile", "For compile and trial", "Bytes"]
    return [
        "**What a variant gains** in steady calls of its trial. *Calls that pay*: the calls after which the saved time equals "
        "the time of the compile, or of compile and trial together.",
        "",
        *table_lines(header, [":--", ":--", ":--", *["--:"] * 8], body),
        *reasons(select_kind(rows, "gain"), "recipe"),
    ]


def paid_after(row: Row, seconds: float) -> str:
    """The calls after which a variant has saved so many seconds."""
    return format_scaled(1e6 * seconds / (row["generic_us"] - row["variant_us"])) if row["status"] == "faster" else "—"


def reasons(rows: list[Row], name: str) -> list[str]:
    """Why variants failed, or had no verdict, a sentence each."""
    whys = [f"{row[name]}: {row['why']}" for row in rows if row.get("why")]
    return ["", *(f"Not used, {escape(why)}." for why in dict.fromkeys(whys))] if whys else []


def trace_lines(rows: list[Row]) -> list[str]:
    """A table with a line for each trace."""
    body = []
    for row in select_kind(rows, "trace"):
        late = np.array(row["at"]) > 0.75 * row["seconds"]
        rates = [format_scaled(float(np.median(rate(row, way)[late]))) for way in ("generic", "adaptive")]
        ratio = f"{row['speedup']:.3f} ({row['low']:.3f}–{row['high']:.3f}) {row['verdict']}"
        tried = f"{row['faster']} faster, {row['not_faster']} not, {row['undecided']} undecided"
        held = f"{row['loaded']}, {row['bytes']} bytes"
        body.append(
            [row["trace"], *rates, ratio, f"{100 * row['aa_spread']:.1f} %", tried, str(row.get("known") or 0), held]
        )
    header = ["Lengths", "Generic, tokens/s", "Adaptive, tokens/s", "Times as fast", "A/A", "Outcomes", "Known before"]
    return [
        "**While it serves**: the last quarter of each trace. The background process may still compile then. *Known before*: "
        "how many lengths had their verdict in the build cache when the trace began.",
        "",
        *table_lines([*header, "Variants loaded"], [":--", "--:", "--:", ":--", "--:", ":--", "--:", "--:"], body),
        *reasons(select_kind(rows, "trace"), "trace"),
    ]
