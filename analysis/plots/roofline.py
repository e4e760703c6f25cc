"""The roofline: what each kernel reaches of an op on one device, under the roofs that were measured there.

Williams, Waterman and Patterson, Roofline: an insightful visual performance model for multicore architectures, CACM
52(4), 2009. What the roofs are and how they are measured: `minfer.bench.peaks`. An op whose every problem memory bounds has
no roofline: its throughput over size stands beside what memory allows already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes

from minfer.analysis.data.prepare import REFERENCE
from minfer.analysis.plots.every_op import LeftOut, Picture, plain_ticks
from minfer.analysis.plots.series import LEAST_SIZES, setting, shape_words, words
from minfer.analysis.plots.style import LIGHT, SMALL, Theme, figure, name_levels, title
from minfer.analysis.tables.markdown import pluralise, significant
from minfer.analysis.tables.problem import fastest_of_ours
from minfer.rows.problems import natural, number
from minfer.rows.store import Row

CUDA_CORES = "fma_float32"  # the peak of arithmetic without tensor cores, which a kernel can do in any dtype
PARTS = {"others": "other kernels", REFERENCE: "PyTorch", "ours": "fastest of ours"}


def roofline(op: str, device: str, rows: list[Row], theme: Theme = LIGHT) -> Picture:
    """Each problem's fastest kernel of ours and PyTorch, the others in grey, cold; a panel for each kind of arithmetic."""
    if not any(number(row, "flops") for row in rows):
        raise LeftOut("it does no floating-point operations")
    known = [row for row in rows if all(number(row, column) for column in ("cold_tflops", "flops", "bytes"))]
    known = [row for row in known if (row["peaks"] or {}).get("copy_gbps")]
    if not known:
        raise LeftOut("no row has measured peaks")
    found = panels(known)
    if not any(panel.flat or panel.unknown for panel in found):
        raise LeftOut("memory bounds all of its problems, and its throughput over size shows what memory allows")
    found = [panel for panel in found if telling(panel.rows)]
    if not found:
        raise LeftOut(f"it takes two kernels at problems of at least {LEAST_SIZES} different intensities")
    drawn, axes = figure([3.9] * len(found), gap=1.4)
    for ax, panel in zip(axes, found, strict=True):
        title(ax, f"{op} on {device}: roofline", " · ".join([panel.name, "cold", *notes(panel)]))
        parts = split(panel.rows)
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
        draw_roofs(ax, panel, theme)
        plain_ticks(ax.xaxis)
        plain_ticks(ax.yaxis)
        ax.set_xlabel("arithmetic intensity, FLOP per byte of device memory (each operand moved once)")
        ax.set_ylabel("throughput, TFLOP/s")
        ax.legend(loc="lower left", bbox_to_anchor=(1.0, -0.02), frameon=False, fontsize=SMALL, handletextpad=0.4)
    problems = pluralise(len({row["problem"] for panel in found for row in panel.rows}), "problem")
    return Picture(
        drawn, f"Roofline of {op} on {device}: {problems} cold, under the measured bandwidth and arithmetic peaks."
    )


def telling(rows: list[Row]) -> bool:
    """Whether points make a picture: of two kernels, at several intensities."""
    return len({intensity(row) for row in rows}) >= LEAST_SIZES and len({row["kernel"] for row in rows}) > 1


@dataclass
class Panel:
    """The rows of one kind of arithmetic, under its flat roofs in TFLOP/s by the class of instructions, the fastest first.
    `unknown`: no peak of it was measured, so that nothing says whether memory bounds them."""

    name: str
    rows: list[Row]
    flat: dict[str, float]
    unknown: bool = False


def panels(rows: list[Row]) -> list[Panel]:
    """The panels, that with most rows first: settings with one dtype, one `accumulate`, and one kind of products.

    The peak that bounds a setting's rows tells the kind of its products. If memory bounds all of them, they join the panel
    of their dtype. But if the products of that dtype would bound them, theirs must be of another kind, whose peak is
    unknown, and they get a panel of their own."""
    settings: dict[str, list[Row]] = {}
    for row in rows:
        settings.setdefault(setting(row), []).append(row)
    kinds = {name: (*kind(name), products(of, of[0]["peaks"])) for name, of in settings.items()}
    made: dict[tuple[str, str, str], Panel] = {}
    for name in sorted(settings, key=lambda name: (not kinds[name][-1], -len(settings[name]))):  # which say so first
        of, key = settings[name], kinds[name]
        beside = [panel for other, panel in made.items() if panel.flat and other[0] == key[0]]
        if not key[-1] and beside and bound_by_memory(of, beside[0].flat):
            beside[0].rows += of
            continue
        flat = flat_roofs(of, of[0]["peaks"])
        unknown = not flat and (bool(beside) or not any(row["roof"] for row in of))
        made.setdefault(key, Panel("", [], flat, unknown)).rows += of
    for panel in made.values():
        panel.name = in_common([setting(row) for row in panel.rows])
    return sorted(made.values(), key=lambda panel: (-len(panel.rows), natural(panel.name)))


def kind(name: str) -> tuple[str, str]:
    """The dtype of a setting, and what it says of its sums."""
    dtype, _, params = name.partition("/")
    return dtype, next((part for part in params.split(",") if part.startswith("accumulate=")), "")


def in_common(settings: list[str]) -> str:
    """The dtype and those parameters that are the same in all settings, in words."""
    dtype = settings[0].partition("/")[0]
    parts = [name.partition("/")[2].split(",") for name in settings]
    return words("/".join([dtype, ",".join(part for part in parts[0] if all(part in other for other in parts))]))


def split(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows as they are drawn, one after the other: the others, PyTorch's (`torch`, else what the fastest of ours was timed
    beside), the fastest of ours at each problem."""
    problems: dict[str, list[Row]] = {}
    for row in rows:
        problems.setdefault(row["problem"], []).append(row)
    parts: dict[str, list[Row]] = {part: [] for part in PARTS}
    for found in problems.values():
        best = fastest_of_ours(found)
        theirs = REFERENCE if best is None or REFERENCE in (row["kernel"] for row in found) else best["baseline"]
        for row in found:
            mine = best is not None and row["kernel"] == best["kernel"]
            parts["ours" if mine else REFERENCE if row["kernel"] == theirs else "others"].append(row)
    return parts


def notes(panel: Panel) -> list[str]:
    """What a point is, and the problems at the left and right end. Names beside the points would cover other points."""
    least, most = (pick(panel.rows, key=intensity) for pick in (min, max))
    unknown = ["the peak of its arithmetic is not measured"] * panel.unknown
    ends = f"from {shape_words(least)} (left) to {shape_words(most)} (right)"
    return [*unknown, "a point: one kernel at one problem", ends]


def products(rows: Iterable[Row], peaks: Mapping[str, float]) -> str:
    """The inputs and sums of the fastest peak that the rows name: `float16_float32`; of CUDA cores `float32`."""
    named = {row["roof"] for row in rows if row["roof"] in peaks and not row["roof"].endswith("_gbps")}
    return max(named, key=lambda name: (peaks[name], name), default="").partition("_")[2]


def flat_roofs(rows: list[Row], peaks: Mapping[str, float]) -> dict[str, float]:
    """The rates of arithmetic that bound rows of one setting, the fastest first: all classes of instructions that were
    measured for the inputs and sums of the peak that the rows name. None where they name memory alone."""
    kind = products(rows, peaks)
    names = [name for name in peaks if kind and name.partition("_")[2] == kind]
    return {
        "CUDA cores" if name == CUDA_CORES else name.partition("_")[0]: peaks[name]
        for name in sorted(names, key=lambda name: (-peaks[name], name))
    }


def bandwidths(rows: list[Row]) -> dict[str, float]:
    """The measured GB/s of copying and reading."""
    best = {kind: max(row["peaks"].get(f"{kind}_gbps") or 0.0 for row in rows) for kind in ("copy", "read")}
    return {kind: gbps for kind, gbps in best.items() if gbps}


def bound_by_memory(rows: list[Row], flat: Mapping[str, float]) -> bool:
    """Whether the fastest arithmetic would be done with every problem before its bytes have moved."""
    ridge = max(flat.values(), default=math.inf) * 1e3 / min(bandwidths(rows).values())
    return max(map(intensity, rows)) < ridge


def draw_roofs(ax: Axes, panel: Panel, theme: Theme) -> None:
    """Draw the roofs, set the limits, and say what each is: bandwidth in the legend, arithmetic at the right."""
    slanted, flat = bandwidths(panel.rows), panel.flat
    fastest, top = max(slanted.values()), max(flat.values(), default=0.0)
    seen, rates = [intensity(row) for row in panel.rows], [row["cold_tflops"] for row in panel.rows]
    right = max(max(seen) * 1.6, 1.5 * top * 1e3 / fastest)
    left = min(min(seen) / 2, right / 100)
    ax.set_xlim(left, right)
    ax.set_ylim(min(rates) / 2, 1.7 * max(*rates, top or 0.0))
    for (kind, rate), line in zip(slanted.items(), ("-", ":"), strict=False):
        ridge = min(right, top * 1e3 / rate) if top else right
        x, said = [left, ridge], f"{kind} {significant(rate / 1e3, 3)} TB/s"
        ax.plot(x, [rate * at / 1e3 for at in x], line, color=theme.muted, linewidth=1.1, label=said)
    for kind, rate in flat.items():
        ridge = rate * 1e3 / slanted.get("copy", fastest)
        ax.plot([min(ridge, right), right], [rate] * 2, color=theme.muted, linewidth=1.1, label=f"_{kind}")
    name_levels(ax, {f"{kind} {significant(rate)}": rate for kind, rate in flat.items()}, theme.muted)


def intensity(row: Row) -> float:
    """FLOPs a byte, if nothing is moved twice."""
    return float(row["flops"] / row["bytes"])
