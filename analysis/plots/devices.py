"""One op on several devices in one picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from minfer.analysis.data.prepare import REFERENCE
from minfer.analysis.plots.every_op import LeftOut, Picture, points, scales, widest
from minfer.analysis.plots.series import Series, words
from minfer.analysis.plots.style import LIGHT, Theme, figure, name_ends, title
from minfer.analysis.tables.problem import fastest_of_ours
from minfer.rows.problems import number
from minfer.rows.store import Row


def devices(op: str, of: Mapping[str, list[Row]], theme: Theme = LIGHT) -> Picture:
    """The cold throughput of our fastest kernel and of PyTorch over size on each device, at the sizes that all have.

    `of` has the rows of each device, as `analysis.plots` takes them, the primary device first."""
    first, *others = of
    if not others:
        raise LeftOut("it takes rows of two devices")
    timed = {device: [row for row in rows if number(row, "cold_rate")] for device, rows in of.items()}
    everywhere = set.intersection(*({row["problem"] for row in rows} for rows in timed.values()))
    name, found = widest([row for row in timed[first] if row["problem"] in everywhere])
    chosen = {row["problem"] for row in found.rows}
    rows = [row for of_device in timed.values() for row in of_device if row["problem"] in chosen]
    drawn, (ax,) = figure([3.6], right=0.72)
    over = "size" if found.square else found.label
    title(
        ax,
        f"{op} on {len(of)} devices: throughput over {over}",
        " · ".join(filter(None, [words(name), found.fixed, "cold"])),
    )
    ends, hues = dict[str, tuple[float, float]](), dict[str, str]()
    for device, color in zip(of, (theme.ours, *theme.rungs), strict=False):
        for what, style, line in (
            ("ours", "o-", best(timed[device], found, chosen)),
            (
                REFERENCE,
                "o--",
                [row for row in timed[device] if row["kernel"] == REFERENCE and row["problem"] in chosen],
            ),
        ):
            if line:
                line = sorted(line, key=found.size)
                label = f"{device.removeprefix('NVIDIA ')}, {what}"
                ax.plot(*points(line, found), style, color=color, linewidth=2.0, markersize=4, label=label)
                ends[label], hues[label] = (found.size(line[-1]), line[-1]["cold_rate"]), color
    scales(ax, replace(found, rows=rows), roofs=False)
    name_ends(ax, ends, hues)
    about = f"Cold throughput of our fastest {op} kernel and of PyTorch over {found.over} on {' and '.join(of)}."
    return Picture(drawn, about)


def best(rows: list[Row], found: Series, chosen: set[str]) -> list[Row]:
    """The row of our fastest kernel at each size."""
    sizes: dict[int, list[Row]] = {}
    for row in rows:
        if row["problem"] in chosen:
            sizes.setdefault(found.size(row), []).append(row)
    fastest = (fastest_of_ours(of) for of in sizes.values())
    return [row for row in fastest if row]
