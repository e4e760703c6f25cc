"""From samples to the columns that follow from them. The supervisor works them out: the process that ran a kernel gives
nothing but samples, so that no column can say what the samples do not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minfer import ops
from minfer.bench import peaks
from minfer.bench.stats import Comparison, compare, compare_blocks
from minfer.bench.timing import Timing
from minfer.ops import Case

Columns = dict[str, Any]


def derive(
    case: Case,
    cold: Sequence[Sequence[float]],
    steady: Sequence[Sequence[float]],
    timing: Timing,
    roofs: Mapping[str, float] | None,
) -> Columns:
    """The columns of a correct case, its status among them.

    `cold` are seconds, (rounds, 3); `steady` those of four blocks, or nothing; `roofs` what `minfer.bench.peaks`
    measured on a GPU, None on a CPU, whose caches are not all flushed. Raises ValueError for what no clock gives."""
    op = ops.get(case.op)
    rounds, blocks = np.array(cold, dtype=float), [np.array(block, dtype=float) for block in steady]
    if rounds.ndim != 2 or rounds.shape[1] != 3 or len(blocks) not in (0, 4):
        raise ValueError("not the samples of a kernel, its baseline and the baseline's duplicate")
    if not all(len(times) and np.isfinite(times).all() and (times > 0).all() for times in (rounds, *blocks)):
        raise ValueError("a sample is not a time")
    flops, nbytes = op.case_flops(case), op.case_bytes(case)
    comparison = compare(*rounds.T)
    row: Columns = {"status": "ok", "message": None, "baseline": op.baseline(case), "flops": flops, "bytes": nbytes}
    row |= _regime("cold", list(rounds.T), comparison, flops, nbytes) | {"cold_rounds": len(rounds)}
    if comparison.half_width > timing.precision:
        asked, known = f"asked for ±{timing.precision:.2%}", f"known to ±{comparison.half_width:.2%}"
        row |= {"status": "unconverged", "message": f"after {len(rounds)} rounds the ratio is {known}, {asked}"}
    if blocks:
        arms = [np.concatenate([blocks[0], blocks[3]]), blocks[1], blocks[2]]
        row |= _regime("steady", arms, compare_blocks(blocks), flops, nbytes)
        row["steady_blocks"] = [len(block) for block in blocks]
    return row if roofs is None else row | _against_peaks(case, row, roofs)


def _regime(name: str, arms: list[np.ndarray], comparison: Comparison, flops: float, nbytes: float) -> Columns:
    """The columns of one regime, from the samples of kernel, baseline and duplicate."""
    kernel, baseline, duplicate = arms
    median = float(np.median(kernel))
    values = {
        "us": median * 1e6,
        "p10_us": float(np.percentile(kernel, 10)) * 1e6,
        "p90_us": float(np.percentile(kernel, 90)) * 1e6,
        "baseline_us": float(np.median(baseline)) * 1e6,
        "speedup": comparison.speedup,
        "speedup_low": comparison.low,
        "speedup_high": comparison.high,
        "aa_spread": comparison.aa_spread,
        "verdict": comparison.verdict,
        "tflops": flops / median / 1e12,
        "gbps": nbytes / median / 1e9,
        "samples_us": (kernel * 1e6).tolist(),
        "baseline_samples_us": (baseline * 1e6).tolist(),
        "duplicate_samples_us": (duplicate * 1e6).tolist(),
    }
    return {f"{name}_{column}": value for column, value in values.items()}


def _against_peaks(case: Case, row: Mapping[str, Any], roofs: Mapping[str, float]) -> Columns:
    """How near the times are to the device's peaks; what is beyond them is impossible."""
    found: Columns = {}
    dtypes = case.dtype, case.params.get("accumulate", "float32")
    fastest = roofs.get("max_sm_mhz", math.inf)
    floors = {"cold": ops.get(case.op).case_input_bytes(case), "steady": 0.0}  # rotated inputs may be in the cache
    for regime, nbytes in floors.items():
        floor_us = peaks.floor_seconds(roofs, row["flops"], nbytes, *dtypes, fastest) * 1e6
        if regime == "cold":
            found["floor_us"] = floor_us
        if us := row.get(f"{regime}_us"):
            share = peaks.percent(roofs, row["flops"], row["bytes"], *dtypes, us * 1e-6)
            found[f"{regime}_percent_of_peak"] = share
            if us < floor_us:
                message = f"the {regime} time of {us:.4g} us is less than the {floor_us:.4g} us that the peaks allow"
                found |= {"status": "impossible", "message": message}
    return found
