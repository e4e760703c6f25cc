"""The roofs that plots, the report and the claims hold rows against, and that no committed row is drawn above its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from minfer.analysis.data.peaks import limits, under_one_peak
from minfer.analysis.data.prepare import load
from minfer.analysis.makers import plots as make_plots
from minfer.analysis.plots.every_op import Picture
from minfer.analysis.plots.roofline import PARTS
from tests.analysis.test_make_plots import row
from tests.conftest import ROOT


def test_rows_of_runs_with_other_peaks_are_shown_under_the_best_of_each() -> None:
    """A share of an old row's own peak, whatever bounds it, becomes one of the best; the clock comes with the peak."""
    mine = {"copy_gbps": 4000.0, "wgmma_float16_float32": 800.0, "wgmma_float16_float32_mhz": 1600.0}
    best = {"copy_gbps": 3900.0, "wgmma_float16_float32": 832.0, "wgmma_float16_float32_mhz": 1500.0}
    values: dict[str, Any] = {"metric": "TFLOP/s", "roof": None}
    fast = row("v02_tiled", 780.0, 4096, peaks=mine, cold_percent_of_peak=97.5) | values
    slow = row("v01_naive", 2.0, 16, peaks=best, cold_percent_of_peak=19.5) | values | {"roof": "copy_gbps"}
    torch = row("torch", 800.0, 4096, peaks=best, cold_percent_of_peak=100 * 800 / 832) | values
    made = under_one_peak([torch, fast, slow])
    assert [r["peaks"] for r in made] == [best | {"copy_gbps": 4000.0}] * 3
    copying = 100 * 6.0 * 16**2 / 4000 / 1e3 / slow["cold_us"]
    assert [r["cold_percent_of_peak"] for r in made] == pytest.approx([100 * 800 / 832, 97.5 * 800 / 832, copying])
    assert under_one_peak([row(peaks=None) | values])[0]["peaks"] is None
    more = under_one_peak([fast], best | {"wgmma_float16_float32": 900.0})
    assert more[0]["cold_percent_of_peak"] == pytest.approx(100 * 780 / 900)


@pytest.mark.parametrize(
    ("metric", "operands", "microseconds"),
    [
        ("GB/s", "y out float32 (1000, 250); x in float32 (1000, 250)", 2e6 / 4000 / 1e3),
        ("GB/s", "y out float32 (500, 250); x in float32 (1000, 250); n in int32 (0)", (1e6 / 4000 + 1e6 / 5000) / 1e3),
        ("GB/s", "y out float8_e4m3fn (); x in bfloat16 (1000000)", (2 / 4000 + 1999998 / 5000) / 1e3),
        ("GB/s", "cache inout bfloat16 (64, 1000000); k in bfloat16 (8)", 2e6 / 4000 / 1e3),
        ("GB/s", None, 2e6 / 5000 / 1e3),
        ("TFLOP/s", None, 1e9 / 800 / 1e6),
    ],
)
def test_what_is_only_read_counts_at_the_peak_of_reading(
    metric: str, operands: str | None, microseconds: float
) -> None:
    """FLOPs bound nothing where the metric counts bytes, and nobody knows what is written where no row says."""
    peaks = {"copy_gbps": 4000.0, "read_gbps": 5000.0, "wgmma_float16_float32": 800.0}
    made = row(metric=metric, operands=operands, bytes=2e6, flops=1e9, roof="wgmma_float16_float32")
    assert limits([made], peaks) == {("hgemm", made["case"].split("/", 2)[2]): pytest.approx(microseconds)}


@pytest.mark.slow
def test_no_drawn_point_is_above_its_drawn_roof() -> None:
    """Of the committed rows: ladders, lines over size, and rooflines, where bandwidth is between copying and reading."""
    committed, _ = load([], ROOT / "results", make_plots.COLUMNS)
    looked = dict.fromkeys(make_plots.PLOTS, 0)
    for op, device, name, picture in make_plots.pictures(committed):
        for ax in picture.figure.axes if isinstance(picture, Picture) and name in looked else ():
            for x, y, roof in under_roofs(name, ax):
                looked[name] += 1
                assert y <= 1.01 * roof, f"{op} on {device}: {name} has {y:.4g} at {x:.4g}, over its roof of {roof:.4g}"
    assert min(looked.values()) > 100


def under_roofs(name: str, ax: Axes) -> Iterator[tuple[float, float, float]]:
    """Each point of a plot that has a roof: its place, its rate, and the roof there."""
    lines = {str(line.get_label()): np.array(line.get_xydata(), dtype=float) for line in ax.lines}
    if name == "ladder":
        dotted = [float(line.get_xdata()[0]) for line in ax.lines if line.get_linestyle() == ":"]
        yield from ((bar.get_y(), bar.get_width(), dotted[0]) for bars in ax.containers for bar in bars if dotted)
    elif name == "throughput" and "_peak" in lines:
        roof = dict(map(tuple, lines.pop("_peak")))
        # a line is broken, by NaN, at a size that was not measured
        yield from ((x, y, roof[x]) for line in lines.values() for x, y in line if not math.isnan(y))
    elif name == "roofline":
        slope = max(line[0][1] / line[0][0] for label, line in lines.items() if label.endswith("TB/s"))
        flat = max((line[0][1] for label, line in lines.items() if label.startswith("_")), default=math.inf)
        for part in PARTS.values():
            yield from ((x, y, min(slope * x, flat)) for x, y in lines[part])
