"""The record over time, as an SVG of a board's page."""

from __future__ import annotations

import datetime
import html
import math
from collections.abc import Sequence

from minfer.board.folder import Entry

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 260, 56, 150, 16, 34


def draw_record(entries: Sequence[Entry], records: Sequence[Entry], since: Sequence[float]) -> str:
    """All ranked submissions as dots, and the record as steps; ratios on a logarithmic axis. since: when each of `records` took
    it."""
    begin, end = min(e.when for e in entries), max(*(e.when for e in entries), *since)
    values = [entry.score["value"] for entry in entries]
    low, high = math.log2(min(values)) - 0.15, math.log2(max(values)) + 0.15

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (0.5 if end == begin else (seconds - begin) / (end - begin))

    def y(ratio: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log2(ratio)) / (high - low)

    parts = []
    for tick in _ticks(low, high):
        parts.append(f"<line class='axis' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y(tick):.1f}' y2='{y(tick):.1f}'/>")
        parts.append(f"<text x='{LEFT - 8}' y='{y(tick) + 4:.1f}' text-anchor='end'>{tick:.3g}×</text>")
    for when, anchor in ((begin, "start"), (end, "end")) if end > begin else ((begin, "middle"),):
        day = f"{datetime.datetime.fromtimestamp(when, datetime.UTC):%Y-%m-%d %H:%M}"
        parts.append(f"<text x='{x(when):.1f}' y='{HEIGHT - 10}' text-anchor='{anchor}'>{day}</text>")
    path = f"M{x(records[0].when):.1f},{y(records[0].score['value']):.1f}"
    for when, entry in list(zip(since, records, strict=True))[1:]:
        path += f"H{x(when):.1f}V{y(entry.score['value']):.1f}"
    parts.append(f"<path class='step' d='{path}H{WIDTH - RIGHT}'/>")
    held = {entry.id for entry in records}
    for entry in entries:
        kind = "holder" if entry.id in held else "dot"
        at = f"cx='{x(entry.when):.1f}' cy='{y(entry.score['value']):.1f}'"
        parts.append(f"<circle class='{kind}' {at} r='4'><title>{html.escape(entry.title)}</title></circle>")
    last = records[-1]
    parts.append(
        f"<text x='{WIDTH - RIGHT + 8}' y='{y(last.score['value']) + 4:.1f}'>{html.escape(last.name[:20])}</text>"
    )
    said = f"The record of {len(entries)} submissions; it is held by {last.title}."
    return (
        f"<svg class='record' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' role='img' aria-label='{html.escape(said)}'>"
        f"{''.join(parts)}</svg>\n"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round ratios for an axis from 2^low to 2^high, about six."""
    begin, end = 2**low, 2**high
    rough = (end - begin) / 6
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * part for part in (1, 2, 5, 10) if size * part >= rough)
    return [step * k for k in range(math.ceil(begin / step), math.floor(end / step) + 1) if k > 0]
