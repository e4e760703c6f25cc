"""The roofline: every kernel and problem of one op on one device under the roofs that were measured there.

Williams, Waterman and Patterson, Roofline: an insightful visual performance model for multicore architectures, CACM
52(4), 2009. What the roofs are and how they are measured: `minfer.bench.peaks`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes

from analysis.plots import LeftOut, Picture, bandwidth, fullest_first, latest_peaks, plain_ticks
from analysis.readme import counted, significant
from analysis.rows import number
from analysis.series import setting, words
from analysis.style import INK, SMALL, figure, look, name_ends, title
from minfer.rows.store import Row

CUDA_CORES = "fma_float32"  # the peak of arithmetic without tensor cores, which a kernel can do in any dtype
COUNTED_BYTES = "ncu.dram_bytes"


def roofline(op: str, device: str, rows: list[Row]) -> Picture:
    """Every kernel and problem under the measured roofs, cold; a panel for each dtype and parameters."""
    if not any(number(row, "flops") for row in rows):
        raise LeftOut("it does no floating-point operations")
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if all(number(row, column) for column in ("cold_tflops", "flops", "bytes")):
            panels.setdefault(setting(row), []).append(row)
    roofs = {name: latest_peaks(points) for name, points in panels.items()}
    panels = {name: points for name, points in panels.items() if roofs[name].get("copy_gbps")}
    if not panels:
        raise LeftOut("no row has measured peaks")
    drawn, axes = figure([max(5.4, 0.9 + 0.2 * len({row["kernel"] for row in rows}))] * len(panels))
    about = []
    for ax, name in zip(axes[:, 0], fullest_first(panels), strict=True):
        points = panels[name]
        hollow = " · hollow: bytes as counted by the profiler" if any(map(counted_intensity, points)) else ""
        title(ax, f"{op} on {device}: roofline", f"{words(name)} · cold{hollow}")
        ends = {kernel: draw_points(ax, kernel, points) for kernel in dict.fromkeys(row["kernel"] for row in points)}
        ax.set_xscale("log")
        ax.set_yscale("log")
        seen = [x for row in points for x in (intensity(row), counted_intensity(row)) if x]
        x, tflops = (min(seen) / 2, max(seen) * 1.4), [row["cold_tflops"] for row in points]
        said = draw_roofs(ax, flat_roofs(name, points, roofs[name]), roofs[name], x, tflops)
        about.append(f"{words(name)}, {counted(len(points), 'point')} under {said}")
        plain_ticks(ax.xaxis)
        plain_ticks(ax.yaxis)
        ax.set_xlabel("arithmetic intensity, FLOP per byte of device memory (each operand moved once)")
        ax.set_ylabel("throughput, TFLOP/s")
        name_ends(ax, ends)
    return Picture(drawn, f"Roofline of {op} on {device}, cold: " + "; ".join(about))


def draw_points(ax: Axes, kernel: str, rows: list[Row]) -> tuple[float, float]:
    """A kernel's problems, each at its least bytes and, hollow, at those that a profiler counted; the last point."""
    rows = sorted((row for row in rows if row["kernel"] == kernel), key=intensity)
    style = look(kernel).points | {"linestyle": ""}
    x, y = [intensity(row) for row in rows], [row["cold_tflops"] for row in rows]
    ax.plot(x, y, label=kernel, markeredgewidth=0, zorder=3, **style)
    moved = [(intensity(row), seen, row["cold_tflops"]) for row in rows if (seen := counted_intensity(row))]
    if moved:
        links = [(x, tflops) for least, seen, tflops in moved for x in (least, seen, math.nan)]
        ax.plot(*zip(*links, strict=True), color=style["color"], linewidth=0.6, alpha=0.6)
        ax.plot(
            *zip(*(point[1:] for point in moved), strict=True), fillstyle="none", label=f"{kernel}, counted", **style
        )
    return x[-1], y[-1]


def flat_roofs(name: str, rows: Iterable[Row], peaks: Mapping[str, float]) -> dict[str, str]:
    """The rates of arithmetic that bound problems of a dtype and parameters, the fastest first: how each is called and the
    name of its peak. They are the instruction classes that were measured for the dtype and its accumulator, the CUDA
    cores, and what rows name as their roof."""
    dtype, _, params = name.partition("/")
    accumulate = dict(part.partition("=")[::2] for part in params.split(",")).get("accumulate", "float32")
    ending, named = f"_{dtype}_{accumulate}", {row["roof"] for row in rows}
    found = [
        peak
        for peak in peaks
        if peak.endswith(ending) or peak == CUDA_CORES or (peak in named and not peak.endswith("_gbps"))
    ]
    fastest_first = sorted(found, key=lambda peak: (-peaks[peak], peak))
    return {"CUDA cores" if peak == CUDA_CORES else peak.removesuffix(ending): peak for peak in fastest_first}


def draw_roofs(
    ax: Axes, roofs: Mapping[str, str], peaks: Mapping[str, float], x: tuple[float, float], tflops: list[float]
) -> str:
    """Draw the roofs, set the limits, label the roofs where no point can be: above the slanted one. What they are."""
    flat = {kind: peaks[peak] for kind, peak in roofs.items()}
    slanted = {c: rate for c in ("copy", "read") if (rate := peaks.get(f"{c}_gbps", 0.0)) > 0}
    fastest = max(slanted.values())
    top = max(flat.values(), default=0.0)
    right = max(x[1], 1.3 * top * 1e3 / fastest)
    if flat:  # room for the slanted roof's label below the flat ones'
        x = (min(x[0], min(flat.values()) * 1e3 / fastest / 15), right)
    ax.set_xlim(x[0], right)
    ax.set_ylim(min(tflops) / 2, 1.6 * max(*tflops, top or fastest * right / 1e3))
    said = []
    for (kind, rate), line in zip(slanted.items(), ("-", ":"), strict=False):
        ridge = min(right, top * 1e3 / rate) if top else right
        ax.plot(
            [x[0], ridge], [rate * x[0] / 1e3, rate * ridge / 1e3], line, color=INK, linewidth=1.1, label=f"_{kind}"
        )
        said.append(f"{kind} {bandwidth(rate)}" + (" (dotted)" if line == ":" else ""))
    start = max(x[0], ax.get_ylim()[0] * 1e3 / fastest)  # where the slanted roof enters the picture
    low = (rate for rate in flat.values() if rate < top / 4)  # roofs that the label must not lie on
    edges = sorted([start, min(right, top * 1e3 / fastest) if top else right, *(rate * 1e3 / fastest for rate in low)])
    left, end = max(itertools.pairwise(edges), key=lambda pair: pair[1] / pair[0])
    middle = math.sqrt(left * end)
    (x0, y0), (x1, y1) = ax.transData.transform([(start, fastest * start / 1e3), (middle, fastest * middle / 1e3)])
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    text: dict[str, Any] = {"rotation": angle, "rotation_mode": "anchor", "ha": "center", "fontsize": SMALL}
    shift = (-6 * math.sin(math.radians(angle)), 6 * math.cos(math.radians(angle)))
    ax.annotate(", ".join(said), (middle, fastest * middle / 1e3), shift, "data", "offset points", **text)
    for kind, rate in flat.items():
        ridge = rate * 1e3 / slanted.get("copy", fastest)
        ax.plot([ridge, right], [rate] * 2, color=INK, linewidth=1.1, label=f"_{kind}")
        ax.plot([x[0], ridge], [rate] * 2, color=INK, linewidth=0.8, linestyle=(0, (1, 3)))
        clock = peaks.get(f"{roofs[kind]}_mhz")
        said.append(f"{kind} {significant(rate)} TFLOP/s")
        at = f" at {clock:.0f} MHz" if clock else ""
        above: dict[str, Any] = {"xytext": (4, 3), "va": "bottom"} if rate == top else {"xytext": (4, -3), "va": "top"}
        ax.annotate(said[-1] + at, (x[0], rate), textcoords="offset points", fontsize=SMALL, **above)
    return ", ".join(said)


def intensity(row: Row) -> float:
    """FLOPs a byte, if nothing is moved twice."""
    return row["flops"] / row["bytes"]


def counted_intensity(row: Row) -> float | None:
    """FLOPs a byte that the profiler saw move; None where none looked."""
    moved = (row["metrics"] or {}).get(COUNTED_BYTES)
    return row["flops"] / moved if moved and 0 < moved < math.inf else None
