"""A graph before and after fusing as one SVG: calls from top to bottom, what was fused in one colour on both sides.

`torch.fx.passes.graph_drawer` needs the program `dot`, which pip cannot install, and draws weights and numbers as nodes of
their own: a layer fills a wall. Here a call is a box in its order, and its inputs are lines from the boxes that made them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import count
from pathlib import Path

from torch.fx import Graph

from minfer.fusion.rewrite import Outcome

Box = tuple[str, str, tuple[str, ...]]  # a node's name, what it says, and the names of what it takes
COLOURS = ("#b3d4f5", "#f7d3a1", "#c5e6b8", "#e3c8ee", "#f5c0c0", "#d6d6a5")
REFUSED, PLAIN = "#eeeeee", "#ffffff"
WIDTH, HEIGHT, GAP, SIDE = 420, 22, 12, 110


def drawing(graph: Graph) -> list[Box]:
    """What a picture shows of a graph, which may change afterwards."""
    boxes = []
    for node in graph.nodes:
        if node.op == "output" or (node.op == "call_function" and node.users):
            value = node.meta.get("val")
            shape = "×".join(map(str, value.shape)) if hasattr(value, "shape") else ""
            called = "output" if node.op == "output" else str(node.target).replace("torch.ops.", "")
            boxes.append(
                (node.name, f"{node.name} = {called}  {shape}", tuple(each.name for each in node.all_input_nodes))
            )
    return boxes


def svg(before: Sequence[Box], after: Sequence[Box], outcomes: Iterable[Outcome]) -> str:
    """Both side by side, and below them a sentence for each match."""
    outcomes = list(outcomes)
    old: dict[str, str] = {}
    new: dict[str, str] = {}
    for outcome in outcomes:
        old |= dict.fromkeys(outcome.nodes, REFUSED) if not outcome.fused else {}
    for number, outcome in enumerate(each for each in outcomes if each.fused):
        colour = COLOURS[number % len(COLOURS)]
        old |= dict.fromkeys(outcome.nodes, colour)
        new |= dict.fromkeys(outcome.new, colour)
    left, right = _column(before, old, SIDE), _column(after, new, SIDE + WIDTH + SIDE)
    foot = 40 + (HEIGHT + GAP) * max(len(before), len(after))
    lines = [
        f'<text x="{SIDE}" y="{foot + 18 * i}">{escape(each.sentence())}</text>' for i, each in enumerate(outcomes, 1)
    ]
    longest = max((len(each.sentence()) for each in outcomes), default=0)
    width, height = max(2 * (SIDE + WIDTH) + 20, SIDE + 20 + 7 * longest), foot + 18 * len(outcomes) + 30
    title = (
        f'<text x="{SIDE}" y="20">before: {len(before)} nodes</text>'
        f'<text x="{2 * SIDE + WIDTH}" y="20">after: {len(after)} nodes</text>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" font-size="11">'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, paper, title, *left, *right, *lines, "</svg>\n"])


def _column(boxes: Sequence[Box], colours: dict[str, str], x: int) -> list[str]:
    at = {name: 32 + (HEIGHT + GAP) * row for row, (name, _, _) in enumerate(boxes)}
    drawn = []
    for name, text, inputs in boxes:
        y = at[name]
        drawn.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="3" fill="{colours.get(name, PLAIN)}" stroke="#555"/>'
            f'<text x="{x + 6}" y="{y + 15}">{escape(text)}</text>'
        )
        for source in inputs:
            if source not in at:  # a weight or an input of the graph
                continue
            if at[source] + HEIGHT + GAP == y:
                drawn.append(f'<path d="M{x + WIDTH // 2} {at[source] + HEIGHT}V{y}" stroke="#555" fill="none"/>')
            else:  # past the boxes between them
                bow, start = x - min(SIDE - 15, 8 + (y - at[source]) // 12), at[source] + HEIGHT // 2
                drawn.append(
                    f'<path d="M{x} {start}C{bow} {start} {bow} {y + 8} {x} {y + 8}" stroke="#999" fill="none"/>'
                )
    return drawn


def write(folder: Path, before: Sequence[Box], after: Sequence[Box], outcomes: Iterable[Outcome]) -> Path:
    """A new file `graph-<number>.svg` in the folder, which is made. Other processes and threads may write there too."""
    folder.mkdir(parents=True, exist_ok=True)
    text = svg(before, after, outcomes)
    for number in count():
        path = folder / f"graph-{number}.svg"
        try:
            with open(path, "x") as file:
                file.write(text)
            return path
        except FileExistsError:
            continue
    raise AssertionError("unreachable")
