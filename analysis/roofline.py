"""The roofline: what each kernel reaches of an op on one device, under the roofs that were measured there.

Williams, Waterman and Patterson, Roofline: an insightful visual performance model for multicore architectures, CACM
52(4), 2009. What the roofs are and how they are measured: `minfer.bench.peaks`. An op whose every problem memory bounds has
no roofline: its throughput over size stands beside what memory allows already.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes

from analysis.peaks import best_peaks
from analysis.plots import LeftOut, Picture, plain_ticks
from analysis.readme import counted, significant
from analysis.rows import REFERENCE, natural, number
from analysis.series import shape_words, words
from analysis.style import LIGHT, SMALL, Theme, figure, title
from analysis.tables import fastest_of_ours
from minfer.rows.store import Row

CUDA_CORES = "fma_float32"  # the peak of arithmetic without tensor cores, which a kernel can do in any dtype
PARTS = {"others": "other kernels", REFERENCE: "PyTorch", "ours": "fastest of ours"}


def roofline(op: str, device: str, rows: list[Row], theme: Theme = LIGHT) -> Picture:
    """Each problem's fastest kernel of ours and PyTorch, the others in grey, cold; a panel for each dtype."""
    if not any(number(row, "flops") for row in rows):
        raise LeftOut("it does no floating-point operations")
    panels: dict[str, list[Row]] = {}
    for row in rows:
        peaks = row["peaks"] or {}
        if all(number(row, column) for column in ("cold_tflops", "flops", "bytes")) and peaks.get("copy_gbps"):
            panels.setdefault(row["problem"].partition("/")[0], []).append(row)
    if not panels:
        raise LeftOut("no row has measured peaks")
    names = sorted(panels, key=lambda name: (-len(panels[name]), natural(name)))
    roofs = {name: named_roofs(name, panels[name]) for name in names}
    if all(bound_by_memory(panels[name], roofs[name]) for name in names):
        raise LeftOut("memory bounds all of its problems, and its throughput over size shows what memory allows")
    drawn, axes = figure([3.9] * len(names), gap=1.15)
    for ax, name in zip(axes, names, strict=True):
        points = panels[name]
        title(ax, f"{op} on {device}: roofline", f"{words(name)} · cold · a point: one kernel at one problem")
        parts = split(points)
        for part, of in parts.items():
            color, size, edge = {
                "others": (theme.others, 3.0, 0.0), REFERENCE: (theme.torch, 5.5, 1.3), "ours": (theme.ours, 5.5, 0.0)
            }[part]  # fmt: skip
            fill = "none" if part == REFERENCE else color
            x, y = [intensity(row) for row in of], [row["cold_tflops"] for row in of]
            ax.plot(
                x, y, "o", color=color, markersize=size, markeredgewidth=edge, markerfacecolor=fill, label=PARTS[part]
            )
        ax.set_xscale("log")
        ax.set_yscale("log")
        draw_roofs(ax, points, roofs[name], theme)
        for row, text, shift, side in telling(parts["ours"] or parts[REFERENCE]):
            at = intensity(row), row["cold_tflops"]
            ax.annotate(text, at, shift, "data", "offset points", fontsize=SMALL, ha=side)
        plain_ticks(ax.xaxis)
        plain_ticks(ax.yaxis)
        ax.set_xlabel("arithmetic intensity, FLOP per byte of device memory (each operand moved once)")
        ax.set_ylabel("throughput, TFLOP/s")
    axes[0].legend(loc="lower left", bbox_to_anchor=(1.0, -0.02), frameon=False, fontsize=SMALL, handletextpad=0.2)
    problems = counted(len({row["problem"] for name in names for row in panels[name]}), "problem")
    return Picture(
        drawn, f"Roofline of {op} on {device}: {problems} cold, under the measured bandwidth and arithmetic peaks."
    )


def split(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows as they are drawn, one after the other: the others, PyTorch's, the fastest of ours at each problem."""
    problems: dict[str, list[Row]] = {}
    for row in rows:
        problems.setdefault(row["problem"], []).append(row)
    parts: dict[str, list[Row]] = {part: [] for part in PARTS}
    for found in problems.values():
        best = fastest_of_ours(found)
        for row in found:
            mine = best is not None and row["kernel"] == best["kernel"]
            parts["ours" if mine else REFERENCE if row["kernel"] == REFERENCE else "others"].append(row)
    return parts


def telling(rows: list[Row]) -> list[tuple[Row, str, tuple[float, float], str]]:
    """The points that tell something: those with the least and the most operations a byte. Each with its shape, where its
    label lies from it in points, and which side of the label that is."""
    if not rows:
        return []
    least = min(rows, key=lambda row: (intensity(row), row["cold_tflops"]))
    most = max(rows, key=lambda row: (intensity(row), row["cold_tflops"]))
    found = [(least, shape_words(least), (6.0, -11.0), "left")]
    return found + [(most, shape_words(most), (4.0, 14.0), "right")] * (intensity(least) < intensity(most))


def flat_roofs(name: str, rows: Iterable[Row], peaks: Mapping[str, float]) -> dict[str, str]:
    """The rates of arithmetic that bound problems of a dtype, with or without parameters behind it, the fastest first: how
    each is called and the name of its peak. They are the instruction classes that were measured for the dtype and its
    accumulator (any, where there are no parameters), the CUDA cores, and what rows name as their roof."""
    dtype, _, params = name.partition("/")
    accumulate = dict(part.partition("=")[::2] for part in params.split(",")).get("accumulate", "float32")
    ending, named = re.compile(f"_{dtype}_{accumulate if params else '[a-z0-9]+'}$"), {row["roof"] for row in rows}
    found: dict[str, str] = {}
    for peak in sorted(peaks, key=lambda peak: (-peaks[peak], peak)):
        if peak.endswith(("_gbps", "_mhz")):
            continue
        if peak == CUDA_CORES or peak in named or ending.search(peak):
            found.setdefault("CUDA cores" if peak == CUDA_CORES else ending.sub("", peak), peak)
    return found


def named_roofs(dtype: str, rows: list[Row]) -> dict[str, float]:
    """The flat roofs of a dtype in TFLOP/s, from the peaks of all its rows."""
    peaks = best_peaks(rows)
    return {kind: peaks[peak] for kind, peak in flat_roofs(dtype, rows, peaks).items()}


def bandwidths(rows: list[Row]) -> dict[str, float]:
    """The measured GB/s of copying and reading."""
    best = {kind: max(row["peaks"].get(f"{kind}_gbps") or 0.0 for row in rows) for kind in ("copy", "read")}
    return {kind: gbps for kind, gbps in best.items() if gbps}


def bound_by_memory(rows: list[Row], flat: Mapping[str, float]) -> bool:
    """Whether the fastest arithmetic would be done with every problem before its bytes have moved."""
    ridge = max(flat.values(), default=math.inf) * 1e3 / max(bandwidths(rows).values())
    return bool(flat) and max(map(intensity, rows)) < ridge


def draw_roofs(ax: Axes, rows: list[Row], flat: Mapping[str, float], theme: Theme) -> None:
    """Draw the roofs, set the limits, and say what each is: bandwidth above its slope, arithmetic at the right."""
    slanted = bandwidths(rows)
    fastest, top = max(slanted.values()), max(flat.values(), default=0.0)
    seen, rates = [intensity(row) for row in rows], [row["cold_tflops"] for row in rows]
    right = max(max(seen) * 1.6, 1.5 * top * 1e3 / fastest)
    left = min(min(seen) / 2, right / 100)
    ax.set_xlim(left, right)
    ax.set_ylim(min(rates) / 2, 1.7 * max(*rates, top or fastest * right / 1e3))
    for (kind, rate), line in zip(slanted.items(), ("-", ":"), strict=False):
        ridge = min(right, top * 1e3 / rate) if top else right
        x = [left, ridge]
        ax.plot(x, [rate * at / 1e3 for at in x], line, color=theme.muted, linewidth=1.1, label=f"_{kind}")
    start = max(left, ax.get_ylim()[0] * 1e3 / fastest)
    end = min(right, top * 1e3 / fastest) if top else right
    middle = math.sqrt(start * end)
    (x0, y0), (x1, y1) = ax.transData.transform([(start, fastest * start), (middle, fastest * middle)])
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    said = ", ".join(f"{kind} {significant(rate / 1e3, 3)} TB/s" for kind, rate in slanted.items())
    shift = (-6 * math.sin(math.radians(angle)), 6 * math.cos(math.radians(angle)))
    ax.annotate(
        said, (middle, fastest * middle / 1e3), shift, "data", "offset points", rotation=angle, rotation_mode="anchor",
        ha="center", fontsize=SMALL, color=theme.muted,
    )  # fmt: skip
    for kind, rate in flat.items():
        ridge = rate * 1e3 / slanted.get("copy", fastest)
        ax.plot([min(ridge, right), right], [rate] * 2, color=theme.muted, linewidth=1.1, label=f"_{kind}")
        ax.annotate(
            f"{kind} {significant(rate)}", (1, rate), (4, 0), ("axes fraction", "data"), "offset points", va="center",
            fontsize=SMALL, color=theme.muted,
        )  # fmt: skip


def intensity(row: Row) -> float:
    """FLOPs a byte, if nothing is moved twice."""
    return float(row["flops"] / row["bytes"])
