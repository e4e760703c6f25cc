"""The picture and the table of `examples/generate_kernels.py --compare`: what a guided search finds, and what a random one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from minfer.analysis.plots.every_op import Picture
from minfer.analysis.plots.style import LIGHT, SMALL, Theme, figure, printable, title
from minfer.analysis.tables.markdown import table_lines
from minfer.rows.store import Row

WAYS = ("guided", "random")


def find_bests(rows: Sequence[Row]) -> list[float]:
    """The best ratio after each submission; 0 before the first that has a rank."""
    return list(accumulate((row["ratio"] or 0.0 for row in sorted(rows, key=lambda row: row["number"])), max))


def generated(rows: list[Row], device: str, theme: Theme = LIGHT) -> Picture:
    """The best ratio over submissions of each op, for both ways to search."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    drawn, axes = figure([1.9] * len(ops))
    title(axes[0], f"Generated kernels on {device}", "the best judged ratio so far; dots are single submissions")
    colours = dict(zip(WAYS, (theme.ours, theme.torch), strict=True))
    said = []
    for ax, op in zip(axes, ops, strict=True):
        for way in WAYS:
            own = [row for row in rows if (row["op"], row["way"]) == (op, way)]
            ranked = [row for row in own if row["ratio"]]
            bests = [(number, best) for number, best in enumerate(find_bests(own), 1) if best]
            if not bests:
                continue
            ax.plot(
                [row["number"] for row in ranked],
                [row["ratio"] for row in ranked],
                "o",
                color=colours[way],
                markersize=3,
            )
            ax.step(*zip(*bests, strict=True), where="post", color=colours[way], label=way)
            said.append(f"{op}, {way}: {bests[-1][1]:.2f} after {len(own)}")
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")
        ax.tick_params(axis="y", which="both", labelsize=SMALL)
        ax.set_ylabel(f"{op}: × PyTorch")
        ax.legend(fontsize=SMALL, frameon=False, loc="lower right")
    axes[-1].set_xlabel("submissions")
    return Picture(drawn, printable(f"The best ratio to PyTorch on {device}: {'; '.join(said)}."))


def generated_lines(rows: list[Row]) -> list[str]:
    """A table with the first and the best of each search."""
    body = []
    for op, way in dict.fromkeys((row["op"], row["way"]) for row in rows):
        own = [row for row in rows if (row["op"], row["way"]) == (op, way)]
        ranked = [row for row in own if row["ratio"]]
        best = max(ranked, key=lambda row: row["ratio"], default=None)
        first = own[0]
        body.append([
            op, way, str(len(own)), str(len(ranked)), _ratio(first) if first["ratio"] else first["verdict"],
            _ratio(best) if best else "–", f"`{best['constants']}`" if best else "–",
        ])  # fmt: skip
    header = ["Op", "Search", "Submissions", "Ranked", "The first", "The best", "Its constants"]
    return table_lines(header, [":--", ":--", "--:", "--:", "--:", "--:", ":--"], body)


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.3f} ({row['low']:.3f}–{row['high']:.3f})"
