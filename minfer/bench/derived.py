"""From samples to the columns that follow from them. The supervisor works them out: the process that ran a kernel gives
nothing but samples, so that no column can say what the samples do not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minfer import ops
from minfer.bench import peaks
from minfer.bench.stats import LEAST_GAIN, Comparison, compare, compare_blocks
from minfer.bench.timing import Timing
from minfer.ops import Case

Columns = dict[str, Any]

# At its power limit an H200's clock swings by up to a tenth, about once a second. A shorter block sees a part of the swing: of
# a kernel against itself, four of 0.25 s gave ratios from 0.957 to 1.036.
SWING_S, SWING = 1.0, 0.05


def derive(
    case: Case,
    cold: Sequence[Sequence[float]],
    steady: Sequence[Sequence[float]],
    watts: Sequence[float],
    timing: Timing,
    roofs: Mapping[str, float] | None,
    throttle: str = "",
) -> Columns:
    """The columns of a correct case, its status among them.

    `cold`: seconds, (rounds, 3). `steady`: seconds of one call, an array for each of the four blocks, or nothing. `watts`: the
    mean power of each block, or nothing. `roofs`: what `minfer.bench.peaks` measured on a GPU; None on a CPU, whose caches are
    not fully flushed, so that no floor applies. `throttle`: the reasons for a lowered clock while the case was timed. Raises
    ValueError for samples that no clock gives."""
    op = ops.get(case.op)
    rounds, blocks = np.array(cold, dtype=float), [np.array(block, dtype=float) for block in steady]
    if rounds.ndim != 2 or rounds.shape[1] != 3 or len(blocks) not in (0, 4):
        raise ValueError("not the samples of a kernel, its baseline and the baseline's duplicate")
    if not all(len(times) and np.isfinite(times).all() and (times > 0).all() for times in (rounds, *blocks)):
        raise ValueError("a sample is not a time")
    if len(watts) not in (0, len(blocks)) or not all(math.isfinite(w) and w > 0 for w in watts):
        raise ValueError("not the power of the steady blocks")
    work = Work(op.flops(case), op.bytes(case), op.metric.work(op, case))
    comparison = compare(*rounds.T)
    row: Columns = {"status": "ok", "message": None, "baseline": op.baseline(case), "flops": work.flops}
    row |= {"bytes": work.bytes, "metric": op.metric.unit, "operands": "; ".join(map(str, op.specs(case)))}
    row |= _regime("cold", list(rounds.T), comparison, work) | {"cold_rounds": len(rounds)}
    if comparison.half_width > timing.precision:
        asked, known = f"asked for ±{timing.precision:.2%}", f"known to ±{comparison.half_width:.2%}"
        row |= {"status": "unconverged", "message": f"after {len(rounds)} rounds the ratio is {known}, {asked}"}
    if blocks:
        arms = [np.concatenate([blocks[0], blocks[3]]), blocks[1], blocks[2]]
        swings = "power_cap" in throttle and timing.steady_block_s < SWING_S
        row |= _regime("steady", arms, compare_blocks(blocks, SWING if swings else LEAST_GAIN), work)
        row["steady_blocks"] = [len(block) for block in blocks]
    if len(watts):
        row |= _energy(watts, blocks)
    return row if roofs is None else row | _against_peaks(case, row, roofs)


@dataclass(frozen=True)
class Work:
    """What one call does: FLOPs, bytes moved, and the op's own figure of merit."""

    flops: float
    bytes: float
    merit: float


def _regime(name: str, arms: list[np.ndarray], comparison: Comparison, work: Work) -> Columns:
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
        "tflops": work.flops / median / 1e12,
        "gbps": work.bytes / median / 1e9,
        "rate": work.merit / median,
        "samples_us": (kernel * 1e6).tolist(),
        "baseline_samples_us": (baseline * 1e6).tolist(),
        "duplicate_samples_us": (duplicate * 1e6).tolist(),
    }
    return {f"{name}_{column}": value for column, value in values.items()}


def _energy(watts: Sequence[float], blocks: list[np.ndarray]) -> Columns:
    """Joules a call of each block, compared as their times are."""
    joules = [np.array([power * float(np.median(block))]) for power, block in zip(watts, blocks, strict=True)]
    comparison = compare_blocks(joules)
    words = {"faster": "thriftier", "slower": "costlier", "tie": "tie"}
    return {
        "steady_joules": float(np.mean([joules[0], joules[3]])),
        "steady_baseline_joules": float(np.mean([joules[1], joules[2]])),
        "energy_gain": comparison.speedup,
        "energy_gain_low": comparison.low,
        "energy_gain_high": comparison.high,
        "energy_aa_spread": comparison.aa_spread,
        "energy_verdict": words[comparison.verdict],
    }


def _against_peaks(case: Case, row: Mapping[str, Any], roofs: Mapping[str, float]) -> Columns:
    """How near the times are to the device's peaks; what is beyond them is impossible."""
    found: Columns = {}
    op = ops.get(case.op)
    arithmetic = op.arithmetic(case)
    fastest = roofs.get("max_sm_mhz", math.inf)
    floors = {"cold": op.traffic_of(case)[0], "steady": 0.0}  # rotated inputs may be in the cache
    found["roof"] = peaks.roof(roofs, row["flops"], row["bytes"], arithmetic)
    for regime, nbytes in floors.items():
        floor_us = peaks.floor_seconds(roofs, row["flops"], nbytes, arithmetic, fastest) * 1e6
        if regime == "cold":
            found["floor_us"] = floor_us
        if us := row.get(f"{regime}_us"):
            share = peaks.percent(roofs, row["flops"], row["bytes"], arithmetic, us * 1e-6)
            found[f"{regime}_percent_of_peak"] = share
            if us < floor_us:
                message = f"the {regime} time of {us:.4g} us is less than the {floor_us:.4g} us that the peaks allow"
                found |= {"status": "impossible", "message": message}
    return found
