"""Timing one kernel against the baseline, in both regimes, and saying how sure the result is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minfer.bench.clock import Arm, clock_for
from minfer.bench.device import cache_bytes
from minfer.bench.stats import Comparison, compare
from minfer.bench.timing import Timing
from minfer.bench.verify import Function, Trial, random
from minfer.ops import DTYPES, Case, Op

MOST_ROTATIONS = 4096


@dataclass(frozen=True)
class Regime:
    """Times in seconds: one array for the kernel, the baseline and the baseline's duplicate, and what they say."""

    kernel: np.ndarray
    baseline: np.ndarray
    duplicate: np.ndarray
    comparison: Comparison

    def columns(self, name: str, flops: float, nbytes: float) -> dict[str, Any]:
        """The columns of a row that this regime fills."""
        median = float(np.median(self.kernel))
        values = {
            "us": median * 1e6,
            "p10_us": float(np.percentile(self.kernel, 10)) * 1e6,
            "p90_us": float(np.percentile(self.kernel, 90)) * 1e6,
            "baseline_us": float(np.median(self.baseline)) * 1e6,
            "speedup": self.comparison.speedup,
            "speedup_low": self.comparison.low,
            "speedup_high": self.comparison.high,
            "aa_spread": self.comparison.aa_spread,
            "verdict": self.comparison.verdict,
            "tflops": flops / median / 1e12,
            "gbps": nbytes / median / 1e9,
            "samples_us": (self.kernel * 1e6).tolist(),
            "baseline_samples_us": (self.baseline * 1e6).tolist(),
            "duplicate_samples_us": (self.duplicate * 1e6).tolist(),
        }
        return {f"{name}_{key}": value for key, value in values.items()}


class Bench:
    """A kernel and the baseline on the same operands, ready to be timed."""

    def __init__(
        self, op: Op, case: Case, kernel: Function, baseline: Function, device: torch.device, seed: int
    ) -> None:
        self.device, self.clock = device, clock_for(device)
        self.rng = np.random.default_rng(seed)
        call = op.calls[0]
        rand = random(Trial(case, call, "normal", seed), device)
        dtype, out_shape = DTYPES[case.dtype], op.out_shape(case)

        # Enough sets of operands that going round them leaves nothing of the first in the cache.
        size = op.case_bytes(case)
        self.rotations = min(MOST_ROTATIONS, 1 + math.ceil(2 * cache_bytes(device) / size))
        sets = [op.inputs(case, rand) for _ in range(self.rotations)]
        outs = [torch.zeros(out_shape, dtype=dtype, device=device) for _ in sets]

        def arm(function: Function) -> Arm:
            return lambda index: function(outs[index], *sets[index], **call)

        # The duplicate is the same function in an arm of its own, and gets its own samples.
        self.arms = [arm(kernel), arm(baseline), arm(baseline)]

    def warm_up(self, seconds: float) -> None:
        """Run everything for a while: lazy initialisation, and the device's climb from its idle clock."""
        end = time.perf_counter() + seconds
        while True:
            for arm in self.arms[:2]:
                arm(0)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            if time.perf_counter() > end:
                return

    def cold(self, timing: Timing) -> tuple[Regime, bool]:
        """Rounds in shuffled order until the ratio is known to `timing.precision`, looked at only at `timing.looks`.

        Returns the regime and whether it got there before the cap on rounds or on time."""
        deadline = time.perf_counter() + timing.cold_cap_s
        taken = np.empty((0, len(self.arms)))
        for look in timing.looks:
            while len(taken) < look:
                # A round is sent to the GPU whole; a slow kernel's are sent one by one, to stop near the cap.
                rounds = look - len(taken) if len(taken) >= timing.least_rounds else 1
                if len(taken) and (left := deadline - time.perf_counter()) < rounds * taken.sum(axis=1).mean():
                    rounds = 1
                    if left < 0 and len(taken) >= timing.least_rounds:
                        return _regime(taken), False
                order = np.array([self.rng.permutation(len(self.arms)) for _ in range(rounds)])
                taken = np.concatenate([taken, self.clock.cold(self.arms, order)])
            regime = _regime(taken)
            if regime.comparison.half_width <= timing.precision:
                return regime, True
        return regime, False

    def steady(self, timing: Timing, during: Callable[[], None]) -> Regime:
        """Blocks of kernel, baseline, duplicate, kernel (ABBA), each long enough to settle at its own clock.

        Neighbouring blocks are compared, and the interval is the range over them. `during` is called in the kernel's."""
        nothing = lambda: None
        plan = [(0, during), (1, nothing), (2, nothing), (0, during)]
        blocks = [self.clock.steady(self.arms[arm], self.rotations, timing.steady_block_s, hook) for arm, hook in plan]
        middle = [float(np.median(block)) for block in blocks]
        pairs = sorted((middle[1] / middle[0], middle[2] / middle[3]))
        control = abs(math.log(middle[1] / middle[2]))
        comparison = Comparison(math.sqrt(pairs[0] * pairs[1]), pairs[0], pairs[1], math.expm1(control))
        return Regime(np.concatenate([blocks[0], blocks[3]]), blocks[1], blocks[2], comparison)


def _regime(taken: np.ndarray) -> Regime:
    kernel, baseline, duplicate = taken.T
    return Regime(kernel, baseline, duplicate, compare(kernel, baseline, duplicate))
