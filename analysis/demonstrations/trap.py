"""The plot of `benchmarks/clock_trap.py`: one kernel, timed as if it were several, in different ways."""

from __future__ import annotations

from itertools import groupby

from minfer.analysis.plots.every_op import RUNG, Picture, beside, rungs
from minfer.analysis.plots.style import LIGHT, SMALL, Theme, figure, printable, title
from minfer.rows.store import Row

MARKERS = "oD^s"


def clock_trap(device: str, rows: list[Row], theme: Theme = LIGHT) -> Picture:
    """TFLOP/s of the identical candidates, a line for each method and repetition; rows as `runs` takes them."""
    shown = runs(rows)
    drawn, (ax,) = figure([0.3 + 1.3 * RUNG * len(shown)], right=0.68)
    hues = (theme.ours, theme.torch, *theme.rungs)
    what = "a point: one candidate's median · the axis does not start at zero"
    title(ax, f"{device}: one kernel, timed as if it were {len(shown[0][2])}", what)
    for place, (_, _, candidates) in enumerate(shown):
        rates = [candidate["tflops"] for candidate in candidates]
        ax.plot([min(rates), max(rates)], [place, place], color=theme.others, linewidth=5, label="_")
        for number, rate in enumerate(rates):
            color, marker = hues[number % len(hues)], MARKERS[number % len(MARKERS)]
            # equal candidates lie on each other, and the first must still be seen
            size = 10 - 2.0 * (number % len(MARKERS))
            label = f"candidate {number + 1}" if not place else "_"
            ax.plot([rate], [place], marker, color=color, markersize=size, linestyle="", label=label)
        beside(ax, format_apart(rates), place, 62)
        mhz = [candidate["sm_mhz"] for candidate in candidates if candidate.get("sm_mhz")]
        if mhz:
            low, high = f"{min(mhz):.0f}", f"{max(mhz):.0f}"
            beside(ax, low if low == high else f"{low}–{high}", place, 162)
    rungs(ax, [f"{printable(method)}, {repetition + 1}" for method, repetition, _ in shown])
    ax.annotate("apart", (1, 1), (62, 9), "axes fraction", "offset points", ha="right", fontsize=SMALL)
    ax.annotate("SM clock, MHz", (1, 1), (162, 9), "axes fraction", "offset points", ha="right", fontsize=SMALL)
    ax.set_xlabel("throughput that each candidate seems to have, TFLOP/s")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, -0.05), ncols=2, frameon=False, fontsize=SMALL, handletextpad=0.2)
    said = "; ".join(f"{method}: {text}" for method, text in most_apart(rows).items())
    return Picture(drawn, f"One kernel on {device}, timed as if it were several, seems apart from itself by: {said}.")


def runs(rows: list[Row]) -> list[tuple[str, int, list[Row]]]:
    """Method, repetition and candidates in order; methods in the order of the rows, in which they were measured."""
    order = {method: place for place, method in enumerate(dict.fromkeys(row["method"] for row in rows))}
    ordered = sorted(rows, key=lambda row: (order[row["method"]], row["repetition"], row["arm"]))
    groups = groupby(ordered, key=lambda row: (row["method"], row["repetition"]))
    return [(method, repetition, list(candidates)) for (method, repetition), candidates in groups]


def find_spread(rates: list[float]) -> float:
    """How much faster the fastest candidate seems to be than the slowest."""
    return max(rates) / min(rates) - 1


def format_apart(rates: list[float]) -> str:
    return f"{100 * find_spread(rates):.2f} %"


def most_apart(rows: list[Row]) -> dict[str, str]:
    """Of each method, the repetition whose candidates are furthest apart."""
    found: dict[str, list[list[float]]] = {}
    for method, _, candidates in runs(rows):
        found.setdefault(method, []).append([candidate["tflops"] for candidate in candidates])
    return {method: format_apart(max(each, key=find_spread)) for method, each in found.items()}
