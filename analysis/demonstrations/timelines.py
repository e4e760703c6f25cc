"""Pictures of what `benchmarks/timelines.py` records: when warps of a kernel are in which part of their work."""

from __future__ import annotations

from matplotlib.patches import Patch

from minfer.analysis.plots.every_op import Picture, rungs
from minfer.analysis.plots.style import LIGHT, SMALL, Theme, figure, title
from minfer.rows.store import Row

# What is drawn of a kernel, and of each scope its colour in the theme and what happens in it.
DRAWN = {
    "v05_pingpong": ("the two warpgroups of a block", {
        "turn": ("muted", "waits for its turn"), "scores": ("ours", "q kᵀ, until the scores are there"),
        "softmax": ("torch", "exponentials, sums, rounding"), "out": ("pale", "waits for the rest of p v"),
    }),
    "v03_packed": ("the blocks of a key-value head", {
        "keys": ("ours", "attends to the keys of its part"), "merge": ("others", "adds up its warps, writes the part"),
        "combine": ("torch", "counts; the last one adds all parts"),
    }),
    "v14_stream_k": ("some clusters that share tiles", {
        "whole": ("others", "multiplies a whole tile"), "own": ("ours", "multiplies the first steps of its own"),
        "help": ("pale", "multiplies steps of another's tile"), "give": ("rungs", "writes these sums to memory"),
        "wait": ("muted", "waits for sums"), "add": ("torch", "adds them"),
    }),
}  # fmt: skip


def lanes_of(rows: list[Row]) -> dict[str, list[Row]]:
    """The scopes that are drawn, by the name of their line."""
    kernel, found = rows[0]["kernel"], dict[int, list[Row]]()
    for row in sorted(rows, key=lambda row: (row["block"], row["warp"], row["begin"])):
        if row["scope"] in DRAWN[kernel][1]:
            found.setdefault(row["warp"] // 4 if kernel == "v05_pingpong" else row["block"], []).append(row)
    if kernel == "v14_stream_k":
        return sharing(found)
    if kernel == "v03_packed":
        return {f"block {block}": lane for block, lane in found.items()}
    begin, *_, end = [row["begin"] for row in found[0] if row["scope"] == "turn"][3:10]  # six steps
    for number, lane in found.items():
        within = [row for row in lane if begin < row["end"] and row["begin"] < end]
        found[number] = [r | {"begin": max(begin, r["begin"]), "end": min(end, r["end"])} for r in within]
    return {f"warpgroup {number}": lane for number, lane in found.items()}


def sharing(blocks: dict[int, list[Row]]) -> dict[str, list[Row]]:
    """The first two helpers, and the owners of the tiles that they help with."""
    given = {block: [row["tile"] for row in lane if row["scope"] == "give"] for block, lane in blocks.items()}
    own = {block: [row["tile"] for row in lane if row["scope"] == "own"] for block, lane in blocks.items()}
    helpers = [block for block in blocks if given[block]][:2]
    wanted = {tile for block in helpers for tile in given[block]}
    named = {block: f"helps {' and '.join(map(str, given[block]))}" for block in helpers}
    named |= {block: f"owns {own[block][0]}" for block in blocks if wanted & {*own[block]}}
    return {f"cluster {block // 2} {does}": blocks[block] for block, does in named.items()}


def timeline(rows: list[Row], device: str, theme: Theme = LIGHT) -> Picture:
    """What the lanes of a kernel do when."""
    kernel, lanes = rows[0]["kernel"], lanes_of(rows)
    what, scopes = DRAWN[kernel]
    height = 0.2 + 0.3 * len(lanes)  # inches
    drawn, (ax,) = figure([height], right=0.96)
    colors = {name: theme.rungs[0] if of == "rungs" else getattr(theme, of) for name, (of, _) in scopes.items()}
    zero = min(row["begin"] for lane in lanes.values() for row in lane)
    width = max(row["end"] - zero for lane in lanes.values() for row in lane)
    for line, lane in enumerate(lanes.values()):
        for row in lane:
            begin, long = (row["begin"] - zero) * 1e-3, (row["end"] - row["begin"]) * 1e-3
            ax.barh(line, long, 0.72, left=begin, color=colors[row["scope"]], edgecolor=theme.paper, linewidth=0.4)
            if row["scope"] in ("whole", "own", "help") and long > 5e-5 * width:  # 5 % of it
                ink = theme.paper if row["scope"] == "own" else theme.ink
                middle = (begin + long / 2, line)
                ax.annotate(f"tile {row['tile']}", middle, ha="center", va="center", fontsize=SMALL, color=ink)
    rungs(ax, list(lanes))
    ax.set_xlim(0, 1.01e-3 * width)
    ax.set_xlabel("microseconds")
    ax.legend(
        handles=[Patch(color=colors[name], label=f"{name}: {about}") for name, (_, about) in scopes.items()],
        loc="upper left", bbox_to_anchor=(-0.01, -38 / 72 / height), ncols=3 if len(scopes) > 3 else 2,
        frameon=False, fontsize=SMALL, borderpad=0, handlelength=1, columnspacing=1.5,
    )  # fmt: skip
    title(ax, f"{kernel} on {device}", f"{rows[0]['op']} · {rows[0]['shape'].replace(',', ', ')} · {what}")
    return Picture(drawn, f"What {what} of {kernel} do when, on {device}.")
