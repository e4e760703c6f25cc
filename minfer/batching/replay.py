"""A server's work on a trace, under different policies."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real

import numpy as np

from minfer.batching.kernels import Attention, timed
from minfer.batching.policies import NAMES, Batch, Policy
from minfer.batching.traces import Request

Step = Callable[[Batch], float]


@dataclass(frozen=True)
class Result:
    """What a policy made of a trace. NaN stands for what an empty trace does not have.

    padded_share: the part of all batches' slots that is padding.
    tokens_per_s: tokens, padding not counted, over the seconds in which the server is busy.
    busy_share: the part of the time, from the first arrival to the end, in which it is.
    p50_ms, p90_ms, p99_ms: percentiles of the latencies, in milliseconds.
    latencies: from each request's arrival to the end of its batch, in seconds, in the order of the trace."""

    policy: str
    requests: int
    batches: int
    tokens: int
    slots: int
    padded_share: float
    busy_s: float
    busy_share: float
    tokens_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    latencies: tuple[float, ...] = field(repr=False)


def compare(
    trace: Iterable[Request],
    policies: Iterable[Policy | str] | Policy | str = NAMES,
    step: Step | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Result]:
    """Serve the same trace under each policy, or under one; one of a name only has the defaults of `Policy`.

    The arrivals' clock is simulated, the work is not: `step(batch)` runs a batch and returns the seconds that it took, such as
    `timed(Attention(...))`, which is the default with the default's sizes. It may also return what a model of costs says. The
    time of grouping itself, by `clock`, is added.

    Whenever the server is free, it groups all requests that wait into batches, runs them one after the other, and looks
    again: no request waits for more than the round in which it arrives and the next. Raises ValueError for a request that fits
    no batch, before anything runs, and for a step that returns no seconds; TypeError for a trace of anything but Requests."""
    trace = list(trace)
    if unlike := next((type(each).__name__ for each in trace if not isinstance(each, Request)), None):
        raise TypeError(f"a trace has Requests, got {unlike}")
    policies = [policies] if isinstance(policies, Policy | str) else policies
    chosen = [Policy(policy) if isinstance(policy, str) else policy for policy in policies]
    for policy in chosen:
        for request in trace:
            policy.check(request)
    if any(after.arrival < before.arrival for before, after in itertools.pairwise(trace)):
        raise ValueError("a trace must be in the order of its arrivals; sort it")
    if len({request.number for request in trace}) != len(trace):
        raise ValueError("a trace must have requests of different numbers")
    if step is None:
        step = timed(Attention(max((policy.capacity for policy in chosen), default=1)))
    return [_served(trace, policy, step, clock) for policy in chosen]


def _served(trace: Sequence[Request], policy: Policy, step: Step, clock: Callable[[], float]) -> Result:
    now, busy, batches, slots, arrived = 0.0, 0.0, 0, 0, 0
    ends: dict[int, float] = {}
    while arrived < len(trace):
        now = max(now, trace[arrived].arrival)
        first = arrived
        while arrived < len(trace) and trace[arrived].arrival <= now:
            arrived += 1
        begin = clock()
        groups = policy.batches(trace[first:arrived])
        spent = clock() - begin
        now, busy = now + spent, busy + spent
        for batch in groups:
            seconds = step(batch)
            if not (isinstance(seconds, Real) and 0 <= seconds < math.inf):
                raise ValueError(f"a step must return the seconds that it took, got {seconds!r}")
            seconds = float(seconds)  # of NumPy's numbers too
            now, busy = now + seconds, busy + seconds
            batches, slots = batches + 1, slots + batch.slots
            ends.update((request.number, now) for request in batch.requests)
    latencies = [ends[request.number] - request.arrival for request in trace]
    tokens = sum(request.length for request in trace)
    p50, p90, p99 = np.percentile(latencies, (50, 90, 99)).tolist() if latencies else (math.nan,) * 3
    return Result(
        policy=policy.name,
        requests=len(trace),
        batches=batches,
        tokens=tokens,
        slots=slots,
        padded_share=1 - tokens / slots if slots else math.nan,
        busy_s=busy,
        busy_share=busy / (now - trace[0].arrival) if trace and now > trace[0].arrival else math.nan,
        tokens_per_s=tokens / busy if busy else math.nan,
        p50_ms=1e3 * p50,
        p90_ms=1e3 * p90,
        p99_ms=1e3 * p99,
        latencies=tuple(latencies),
    )
