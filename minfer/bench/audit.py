"""A second clock, independent of the first: what CUPTI's activity records say of the same cold calls."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from torch.profiler import ProfilerActivity, profile

from minfer.bench.clock import Candidate, CudaClock, Hooks

CALLS = 20
LEAST_US, MOST_APART = 20.0, 0.02  # shorter kernels are not compared: the window's own cost weighs too much


@dataclass(frozen=True)
class Audit:
    """Median microseconds of all the kernels of one call by either clock, for the same calls; the kernels' names."""

    events_us: float
    cupti_us: float
    kernels: list[str]

    def flags(self) -> list[str]:
        """A sentence when the clocks disagree."""
        if self.cupti_us > LEAST_US and abs(self.events_us / self.cupti_us - 1) > MOST_APART:
            return [f"the clocks disagree: CUDA events say {self.events_us:.2f} us, CUPTI {self.cupti_us:.2f} us"]
        return []


def audit(clock: CudaClock, candidate: Candidate, empty_us: float) -> Audit:
    """Time cold calls with both clocks at once. Events see what an empty window sees too, so that is taken off."""
    order, made = np.zeros((CALLS, 1), dtype=int), 0

    def count_call(index: int) -> object:
        nonlocal made
        made += 1  # more than CALLS where the clock repeats one, because the host was late
        return candidate(index)

    with profile(activities=[ProfilerActivity.CUDA]) as flushes:
        clock.cold([lambda index: None], order, Hooks())
    with profile(activities=[ProfilerActivity.CUDA]) as calls:
        events_us = float(np.median(clock.cold([count_call], order, Hooks()))) * 1e6 - empty_us
    others = {name for name, _ in _kernels(flushes)}
    times: dict[str, list[float]] = defaultdict(list)
    for name, us in _kernels(calls):
        if name not in others:
            times[name].append(us)
    cupti_us = sum(float(np.median(each)) * len(each) / made for each in times.values())
    return Audit(events_us, cupti_us, sorted(times))


def _kernels(recorded: profile) -> list[tuple[str, float]]:
    """Name and microseconds of every kernel that ran."""
    on_device = [event for event in recorded.events() or () if event.device_type.name == "CUDA"]
    return [(event.name, event.time_range.elapsed_us()) for event in on_device]
