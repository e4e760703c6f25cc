"""Pictures and tables of what `benchmarks/timelines.py` records: when warps of a kernel are in which part of their work."""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import median

from matplotlib.patches import Patch

from minfer.analysis.plots.every_op import Picture, rungs
from minfer.analysis.plots.style import LIGHT, SMALL, Theme, figure, title
from minfer.analysis.tables.markdown import escape, table_lines
from minfer.rows.store import Row

LANE = 0.3  # inches
STEPS = range(3, 9)  # of a warpgroup's turns, those that are drawn
LEGIBLE = 0.05  # of the width: a scope that is shorter has no number
Lanes = dict[str, list[Row]]


@dataclass(frozen=True)
class Drawn:
    """What is drawn of a kernel: each scope's colour, by its field in the theme, and what happens in it."""

    what: str
    scopes: dict[str, tuple[str, str]]


DRAWN = {
    "v05_pingpong": Drawn(
        "the two warpgroups of a block",
        {
            "turn": ("muted", "waits for its turn"),
            "scores": ("ours", "q kᵀ, until the scores are there"),
            "softmax": ("torch", "exponentials, sums, rounding"),
            "out": ("pale", "waits for the rest of p v"),
            "store": ("others", "stores out"),
        },
    ),
    "v03_packed": Drawn(
        "the blocks of a key-value head",
        {
            "keys": ("ours", "attends to the keys of its part"),
            "merge": ("others", "adds up its warps, writes the part"),
            "combine": ("torch", "counts; the last one adds all parts"),
        },
    ),
    "v14_stream_k": Drawn(
        "some clusters that share tiles",
        {
            "whole": ("others", "multiplies a whole tile"),
            "own": ("ours", "multiplies the first steps of its own"),
            "help": ("pale", "multiplies steps of another's tile"),
            "give": ("rungs", "writes these sums to memory"),
            "wait": ("muted", "waits for sums"),
            "add": ("torch", "adds them"),
        },
    ),
}


def lanes_of(rows: list[Row]) -> Lanes:
    """The scopes that are drawn, by the name of their line."""
    kernel, found = rows[0]["kernel"], dict[int, list[Row]]()
    for row in sorted(rows, key=lambda row: (row["block"], row["warp"], row["begin"])):
        if row["scope"] in DRAWN[kernel].scopes:
            found.setdefault(row["warp"] if kernel == "v05_pingpong" else row["block"], []).append(row)
    if kernel == "v03_packed":
        return {f"block {block}": lane for block, lane in found.items()}
    if kernel == "v14_stream_k":
        return sharing(found)
    turns = [row["begin"] for row in next(iter(found.values())) if row["scope"] == "turn"]
    begin, end = turns[min(STEPS.start, len(turns) - 1)], turns[min(STEPS.stop, len(turns) - 1)]
    within = {warp: [row for row in lane if begin < row["end"] and row["begin"] < end] for warp, lane in found.items()}
    cut = [
        [row | {"begin": max(begin, row["begin"]), "end": min(end, row["end"])} for row in lane]
        for lane in within.values()
    ]
    return {f"warpgroup {number}": lane for number, lane in enumerate(cut)}


def sharing(blocks: dict[int, list[Row]]) -> Lanes:
    """The helpers of the first tile that has two of them, or else of any, and the owners of all tiles that these help with."""
    tiles = {block: [row["tile"] for row in lane if row["scope"] == "give"] for block, lane in blocks.items()}
    helpers: dict[int, list[int]] = {}
    for block, given in tiles.items():
        for tile in given:
            helpers.setdefault(tile, []).append(block)
    first = max(sorted(helpers), key=lambda tile: min(2, len(helpers[tile])), default=-1)
    helping = helpers.get(first, [])
    wanted = {tile for block in helping for tile in tiles[block]}
    owners = {
        row["tile"]: block
        for block, lane in blocks.items()
        for row in lane
        if row["scope"] == "own" and row["tile"] in wanted
    }
    lanes = {f"cluster {block // 2} helps {' and '.join(map(str, tiles[block]))}": blocks[block] for block in helping}
    return lanes | {f"cluster {owners[tile] // 2} owns {tile}": blocks[owners[tile]] for tile in sorted(owners)}


def timeline(rows: list[Row], device: str, theme: Theme = LIGHT) -> Picture:
    """What the lanes of a kernel do when."""
    kernel, lanes = rows[0]["kernel"], lanes_of(rows)
    drawn, (ax,) = figure([0.2 + LANE * len(lanes)], right=0.96)
    scopes = DRAWN[kernel].scopes
    colors = {
        name: theme.rungs[0] if field == "rungs" else getattr(theme, field) for name, (field, _) in scopes.items()
    }
    zero = min(row["begin"] for lane in lanes.values() for row in lane)
    width = max(row["end"] for lane in lanes.values() for row in lane) - zero
    for line, lane in enumerate(lanes.values()):
        for row in lane:
            begin, long = (row["begin"] - zero) * 1e-3, (row["end"] - row["begin"]) * 1e-3
            ax.barh(line, long, 0.72, left=begin, color=colors[row["scope"]], edgecolor=theme.paper, linewidth=0.4)
            if row["scope"] in ("whole", "own", "help") and long * 1e3 > LEGIBLE * width:
                ink = theme.paper if row["scope"] == "own" else theme.ink
                ax.text(
                    begin + long / 2, line, f"tile {row['tile']}", ha="center", va="center", fontsize=SMALL, color=ink
                )
    rungs(ax, list(lanes))
    ax.set_xlim(0, 1.01 * width * 1e-3)
    ax.set_xlabel("microseconds")
    patches = [Patch(color=colors[name], label=f"{name}: {about}") for name, (_, about) in scopes.items()]
    below = -38 / 72 / (0.2 + LANE * len(lanes))  # of the height of the axes
    ax.legend(
        handles=patches, loc="upper left", bbox_to_anchor=(-0.01, below), ncols=2 if len(patches) < 4 else 3,
        frameon=False, fontsize=SMALL, borderpad=0, handlelength=1, columnspacing=1.5,
    )  # fmt: skip
    title(ax, f"{kernel} on {device}", f"{rows[0]['op']} · {sizes(rows[0])} · {DRAWN[kernel].what}")
    return Picture(drawn, f"What {DRAWN[kernel].what} of {kernel} do when, on {device}.")


def sizes(row: Row) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in json.loads(row["shape"]).items())


def timeline_lines(rows: list[Row]) -> list[str]:
    """A table: how often each scope was recorded, and how long it took."""
    body = []
    for name, (_, about) in DRAWN[rows[0]["kernel"]].scopes.items():
        if long := [row["end"] - row["begin"] for row in rows if row["scope"] == name]:
            body.append([name, escape(about), str(len(long)), f"{median(long):.0f}", f"{max(long):.0f}"])
    return table_lines(["Scope", "What", "Times", "Median (ns)", "Longest (ns)"], [":--", ":--", *["--:"] * 3], body)
