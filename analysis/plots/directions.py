"""Forward and backward of one op below each other: what a training step needs of it."""

from __future__ import annotations

import csv
import io

from minfer.analysis.plots.every_op import LeftOut, Picture, over_sizes
from minfer.analysis.plots.series import Series, series, setting, words
from minfer.analysis.plots.style import LIGHT, Theme, figure, title
from minfer.rows.problems import natural, number
from minfer.rows.store import Row

BACKWARD = "call=backward"


def has_backward(rows: list[Row]) -> bool:
    return any(BACKWARD in row["problem"] for row in rows)


def directions(op: str, device: str, rows: list[Row], theme: Theme = LIGHT) -> Picture:
    """The metric over size, cold, of the setting whose backward has most rows: forward above, backward below."""
    settings: dict[str, list[Row]] = {}
    for row in rows:
        if number(row, "cold_rate"):
            settings.setdefault(setting(row), []).append(row)
    pairs: dict[str, tuple[Series, Series]] = {}
    for name, of in settings.items():
        forward = series(settings.get(without(name), [])) if BACKWARD in name else None
        backward = series(of)
        if forward and backward and (forward.axis, forward.fixed) == (backward.axis, backward.fixed):
            pairs[without(name)] = forward, backward
    if not pairs:
        raise LeftOut("it takes a backward and its forward, each of at least two sizes")
    name = min(pairs, key=lambda name: (-len(pairs[name][1].rows), natural(name)))
    both = dict(zip(("forward", "backward"), pairs[name], strict=True))
    drawn, axes = figure([2.6, 2.6], gap=1.3)
    said = []
    for ax, (direction, found) in zip(axes, both.items(), strict=True):
        title(ax, f"{op} on {device}: {direction}", " · ".join(filter(None, [words(name), found.fixed, "cold"])))
        lines = over_sizes(ax, found, theme)
        said.append(f"{len(lines)} kernels {direction}")
    about = f"Cold throughput of {op} on {device} over {both['forward'].over}: {' and '.join(said)}."
    return Picture(drawn, about, table(both))


def without(name: str) -> str:
    """The setting of the forward that belongs to a backward."""
    dtype, _, params = name.partition("/")
    return f"{dtype}/{','.join(part for part in params.split(',') if part != BACKWARD)}"


def table(both: dict[str, Series]) -> str:
    """The points as CSV."""
    forward = both["forward"]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["direction", "kernel", forward.axis, "cold_us", f"cold_{forward.rows[0]['metric']}", "run"])
    for direction, found in both.items():
        for row in sorted(found.rows, key=lambda row: (natural(row["kernel"]), found.size(row))):
            figures = (f"{row['cold_us']:.3f}", f"{row['cold_rate']:.1f}")
            rows.writerow([direction, row["kernel"], found.size(row), *figures, row["run"]])
    return text.getvalue()
