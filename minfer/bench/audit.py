"""A second clock, independent of the first: what CUPTI's activity records say of the same cold calls."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from minfer.bench.clock import Arm, CudaClock

CALLS = 20
LEAST_US, MOST_APART = 20.0, 0.02  # shorter kernels are not compared: the window's own cost weighs too much


@dataclass(frozen=True)
class Audit:
    """Median microseconds of all the kernels of one call, and their names."""

    us: float
    kernels: list[str]

    def flag(self, cold_us: float, empty_us: float) -> str:
        """A sentence when the clocks disagree. Events see what an empty window sees too, CUPTI does not."""
        events_us = cold_us - empty_us
        if self.us > LEAST_US and abs(events_us / self.us - 1) > MOST_APART:
            return f"the clocks disagree: CUDA events say {events_us:.2f} us, CUPTI {self.us:.2f} us."
        return ""


def audit(clock: CudaClock, arm: Arm) -> Audit:
    """Profile cold calls, flush before each, and keep what is not the flush."""
    flushes = {name for name, _ in _kernels(clock, None)}
    found = [(name, us) for name, us in _kernels(clock, arm) if name not in flushes]
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for name, us in found:
        by_kernel[name].append(us)
    per_call = sum(float(np.median(times)) * len(times) / CALLS for times in by_kernel.values())
    return Audit(per_call, sorted(by_kernel))


def _kernels(clock: CudaClock, arm: Arm | None) -> list[tuple[str, float]]:
    """Name and microseconds of every kernel of CALLS flushed calls."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(CALLS):
            clock.flush()
            if arm is not None:
                arm(0)
        torch.cuda.synchronize(clock.device)
    on_device = [event for event in recorded.events() or () if event.device_type.name == "CUDA"]
    return [(event.name, event.time_range.elapsed_us()) for event in on_device]
