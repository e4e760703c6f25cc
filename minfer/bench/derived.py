"""Computes columns from samples. The supervisor does it: the process that ran a kernel hands over only samples, so it
cannot forge a column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minfer import ops
from minfer.bench import peaks
from minfer.bench.stats import Comparison, compare, compare_blocks
from minfer.bench.timing import RESOLUTION_S, Timing
from minfer.ops import Case
from minfer.rows.rules import LEAST_GAIN

Columns = dict[str, Any]

# At its power limit an H200's clock swings by up to a tenth, about once a second. A block's mean averages that out, if the
# block is long enough: a kernel against itself differed by 0.5 % at most in blocks of 1 s, and by 2.6 % in blocks of 0.5 s.
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
        raise ValueError("the steady blocks need one positive number of watts each, or none at all")
    work = Work(op.flops(case), op.bytes(case), op.metric.work(op, case))
    comparison = compare(*rounds.T)
    row: Columns = {"status": "ok", "message": None, "baseline": op.baseline(case), "flops": work.flops}
    row |= {"bytes": work.bytes, "metric": op.metric.unit, "operands": "; ".join(map(str, op.specs(case)))}
    row |= derive_regime("cold", list(rounds.T), comparison, work, *np.median(rounds, axis=0)[:2].tolist()) | {
        "cold_rounds": len(rounds)
    }
    resolution_s = RESOLUTION_S["cpu" if roofs is None else "cuda"]  # a cold window has one call
    resolved = resolution_s / min(np.median(rounds, axis=0)[:2])
    if comparison.half_width > max(timing.target, resolved):
        asked, known = f"asked for ±{timing.target:.2%}", f"known to ±{comparison.half_width:.2%}"
        clock = f"the clock resolves {100 * resolved:.2g}% ({resolution_s * 1e6:g} µs)"
        row |= {
            "status": "unconverged",
            "message": f"after {len(rounds)} rounds the ratio is {known}; {asked}, and {clock}",
        }
    if blocks:
        times = [call_time(block, gpu=roofs is not None) for block in blocks]
        swings = "power_cap" in throttle and timing.block_s < SWING_S
        comparison = compare_blocks(times, SWING if swings else LEAST_GAIN)
        candidates = [np.concatenate([blocks[0], blocks[3]]), blocks[1], blocks[2]]
        row |= derive_regime(
            "steady", candidates, comparison, work, math.sqrt(times[0] * times[3]), math.sqrt(times[1] * times[2])
        )
        row["steady_blocks"] = [len(block) for block in blocks]
        if len(watts):
            row |= _energy([power * s for power, s in zip(watts, times, strict=True)])
    return row if roofs is None else row | _against_peaks(case, row, roofs)


def call_time(block: np.ndarray, gpu: bool) -> float:
    """Seconds of one call in a steady block: on a GPU their mean, because the clock swings; on a CPU their median, because
    other processes interrupt some."""
    return float(np.mean(block) if gpu else np.median(block))


@dataclass(frozen=True)
class Work:
    """What one call does: FLOPs, bytes moved, and the op's own figure of merit."""

    flops: float
    bytes: float
    merit: float


def derive_regime(
    name: str, candidates: Sequence[np.ndarray], comparison: Comparison, work: Work, seconds: float, baseline_s: float
) -> Columns:
    """The columns of one regime, from the samples of kernel, baseline and duplicate, and the times of the first two."""
    kernel, baseline, duplicate = candidates
    values = {
        "us": seconds * 1e6,
        "p10_us": float(np.percentile(kernel, 10)) * 1e6,
        "p90_us": float(np.percentile(kernel, 90)) * 1e6,
        "baseline_us": baseline_s * 1e6,
        "speedup": comparison.speedup,
        "speedup_low": comparison.low,
        "speedup_high": comparison.high,
        "aa_spread": comparison.aa_spread,
        "verdict": comparison.verdict,
        "tflops": work.flops / seconds / 1e12,
        "gbps": work.bytes / seconds / 1e9,
        "rate": work.merit / seconds,
        "samples_us": (kernel * 1e6).tolist(),
        "baseline_samples_us": (baseline * 1e6).tolist(),
        "duplicate_samples_us": (duplicate * 1e6).tolist(),
    }
    return {f"{name}_{column}": value for column, value in values.items()}


def _energy(joules: Sequence[float]) -> Columns:
    """Joules a call of each block, compared as their times are."""
    comparison = compare_blocks(joules)
    words = {"faster": "thriftier", "slower": "costlier", "tie": "tie"}
    return {
        "steady_joules": (joules[0] + joules[3]) / 2,
        "steady_baseline_joules": (joules[1] + joules[2]) / 2,
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
    traffic = op.traffic_of(case)
    floors = {"cold": traffic[0], "steady": 0.0}  # a few of the rotated inputs may still be in the cache
    found["roof"] = peaks.roof(roofs, row["flops"], traffic, arithmetic)
    for regime, nbytes in floors.items():
        floor_us = peaks.floor_seconds(roofs, row["flops"], nbytes, arithmetic, fastest) * 1e6
        if regime == "cold":
            found["floor_us"] = floor_us
        if us := row.get(f"{regime}_us"):
            share = peaks.percent(roofs, row["flops"], traffic, arithmetic, us * 1e-6, cold=regime == "cold")
            found[f"{regime}_percent_of_peak"] = share
            if us < floor_us:
                message = f"the {regime} time of {us:.4g} us is less than the {floor_us:.4g} us that the peaks allow"
                found |= {"status": "impossible", "message": message}
    return found
