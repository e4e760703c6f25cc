"""Computes the times in the row of an untrusted kernel from the judge's samples, and checks whether the times that were
measured inside of the kernel's process contradict them.

The judge (`minfer.worker.judge`) times blocks of calls from outside. Its times are the result. The times inside are hints,
which tell cold from steady. Each hint is compared with a time that was taken in the same way:

- the kernel's steady time with its blocks. A block begins after a flush and is short, so a call of a few microseconds takes
  longer in it than a steady one. The baseline shows by how much, because the judge also takes the baseline's steady time, in
  a process without a kernel: the kernel's block may lose as much time as the baseline's block does, or the same factor;
- the kernel's cold time with its blocks. A cold call takes no less than a call in a block, except on a GPU: there a cold call
  may leave its output in the cache, and a block writes it to memory. So there the block may take longer by the factor by
  which the baseline's block is longer than its cold time (`Samples.longer`);
- the time of each block by the clock in the kernel's process with its time outside, less what the process and the judge
  waited for a busy CPU, and the difference with that of the baseline's blocks;
- the baseline's steady time with its blocks, and with its steady times in a process without a kernel, whichever are longer;
- the baseline's cold time with its cold times in a process without a kernel, after the same preparation.

The judge also compares two of its own times of the kernel: a call in an ordinary block and a call in a linked block. In
a linked block, an input of each call depends on the result of the call before (`minfer.worker.links`), so a kernel
cannot compute the results of several calls at once. The baseline's blocks show how long the links take.

A hint contradicts the judge if it is off by more than `BELIEVED`, in the direction that favours the kernel. On a busy machine
that can happen to an honest kernel. So the supervisor has both measured again, and accuses a kernel only if every measurement
contradicts it, by more than the baseline's own times vary. A long time of the baseline inside proves nothing on a busy machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minfer import ops
from minfer.bench.derived import Columns, Work, derive_regime
from minfer.bench.stats import compare, median_interval
from minfer.ops import Case
from minfer.rows.rules import REGIMES

# A block contains the wake-up of the process and first touches of fresh memory; a GPU runs a cold call at a higher clock.
BELIEVED = {"cuda": 1.25, "cpu": 1.6}
BESIDE = "beside.speedup"  # the metric: the time of the other kernel in the same rounds over that of the kernel
LINK_VARIES = 1.25  # a kernel's links may take longer than the baseline's by this factor
ATTEMPTS = 4  # times that both are measured before a kernel is accused
# Share of the judge's time for which a thread waits for a CPU. On 2 idle processors it was at most 0.04, beside two busy loops
# at least 0.33.
BUSY_SHARE = 0.1
BUSY = "could not be judged: {}, by no more than a busy machine may explain; run it again when the machine is less busy"
TOO_SHORT = "the judged time of {:.4g} us is less than the {:.4g} us that the peaks allow"
LONGER = "the judge measured {:.4g} us, and the times inside of the kernel's process allow at most {:.4g} us"
WIDE = "the judge knows the ratio to a factor of {:.3g} after {} rounds, and at most {:g} is believed"
AT_ONCE = "takes {:.4g} us a call in the judge's blocks, but {:.4g} us where each call depends on the result of the one before"
FASTER = "the judge measured a speed-up of {:.3g}, and those inside of the kernel's process allow at most {:.3g}"
HELD_UP = (
    "the baseline's blocks took {:.3g} times as long beside the kernel's process as before that process was started"
)


@dataclass(frozen=True)
class Samples:
    """What the judge measured, in seconds for one call.

    `kernel`, `baseline` and `duplicate`: the time of each block; shape (rounds,). On a CPU, the time for which its
    process or the judge waited for a busy CPU is left out, if the system reports it. `work`: the time of each block of
    the kernel, always without these waits. `lag` (of the kernel) and `baseline_lag` (of baseline and duplicate): for
    each block, its time by the judge's clock without these waits, over its time by the clock in its process. `calls`:
    how many calls a block of the kernel has, and one of the baseline. `cold_baseline` and `steady_baseline`: single
    cold calls and steady calls of the baseline in a process without a kernel. `waited`: one number, the share of the
    time of these calls for which the process waited for a CPU, by its thread that waited longest. `baseline_work`: like
    `work`, for the baseline's blocks. `linked`, `linked_baseline`: like `work`, for the linked blocks of the kernel and
    of the baseline. These three are empty if there are no linked blocks."""

    kernel: np.ndarray
    baseline: np.ndarray
    duplicate: np.ndarray
    work: np.ndarray
    lag: np.ndarray
    baseline_lag: np.ndarray
    calls: np.ndarray
    cold_baseline: np.ndarray
    steady_baseline: np.ndarray
    waited: np.ndarray
    baseline_work: np.ndarray
    linked: np.ndarray
    linked_baseline: np.ndarray
    before: np.ndarray
    beside: np.ndarray

    @staticmethod
    def of(found: Mapping[str, Sequence[float]]) -> Samples:
        """Raises ValueError for samples that no clock can give."""
        arrays = {name: np.array(found.get(name, ()), dtype=float) for name in Samples.__dataclass_fields__}
        blocks = [arrays[name] for name in ("kernel", "baseline", "duplicate", "work", "lag")]
        linked = ("linked", "linked_baseline", "baseline_work")
        has_links = any(len(arrays[each]) for each in linked)
        needed = [name for name in arrays if name not in ("before", "beside") and (name not in linked or has_links)]
        if not all(array.ndim == 1 and np.isfinite(array).all() for array in arrays.values()) or not all(
            len(arrays[name]) for name in needed
        ):
            raise ValueError("a sample of the judge is not a time")
        if len(arrays["calls"]) != 2 or not (arrays["calls"] >= 1).all():
            raise ValueError("the judge must say how many calls a block of the kernel has, and one of the baseline")
        if len(arrays["waited"]) != 1:
            raise ValueError("the judge must give one share `waited`")
        blocks += [arrays["beside"]] if len(arrays["beside"]) else []
        if len({len(array) for array in blocks}) > 1 or not all((array >= 0).all() for array in arrays.values()):
            raise ValueError("the judge's samples do not fit each other")
        shortest = 1e-9  # for a block that took no longer than an empty request
        return Samples(**{name: np.maximum(array, shortest) for name, array in arrays.items()})

    @property
    def busy(self) -> bool:
        """Whether other programs kept the CPUs busy."""
        return float(max(self.waited)) > BUSY_SHARE

    @property
    def spread(self) -> float:
        """The upper over the lower quartile of the baseline's blocks or of its steady times, whichever is more: how much the
        machine changes the times of honest code."""
        both = np.concatenate([self.baseline, self.duplicate]), self.steady_baseline
        return max(float(high / low) for low, high in (np.percentile(times, [25, 75]) for times in both))

    @property
    def baseline_block(self) -> float:
        """The lower quartile of the baseline's blocks, because it is the kernel's shortest block that counts."""
        return float(np.percentile(np.concatenate([self.baseline, self.duplicate]), 25))

    def in_a_block(self, steady_s: float) -> float:
        """How long a call may take in a block if it takes `steady_s` in steady timing, judging by the baseline. What waking a
        process costs is lost once a block: the fewer calls it has, the more of that each bears."""
        steady = float(np.median(self.steady_baseline))
        block = max(self.baseline_block, steady)
        calls, of_baseline = self.calls
        return max(steady_s * block / steady, steady_s + (block - steady) * float(of_baseline / calls))

    def linked_call(self) -> float | None:
        """The time of a call of the kernel in its shortest linked block, without the link to the next call. A link
        takes `LINK_VARIES` times the difference between two quartiles: the upper one of the baseline's linked blocks
        and the lower one of its others. None if there are no linked blocks."""
        if not len(self.linked) or not len(self.linked_baseline):
            return None
        calls, of_baseline = self.calls
        more = float(np.percentile(self.linked_baseline, 75) - np.percentile(self.baseline_work, 25))
        link = (
            LINK_VARIES * max(more, 0.0) * of_baseline / max(of_baseline - 1, 1)
        )  # the last call of a block has no link
        return float(min(self.linked) - link * (calls - 1) / calls)

    @property
    def held_up(self) -> float:
        """How many times as long the baseline's blocks surely took beside the kernel's process as before it was started: the
        lower end of the interval of the median beside it, over the upper end of that before. 0 if it was not measured."""
        if not len(self.before):
            return 0.0
        beside, _ = median_interval(np.concatenate([self.baseline, self.duplicate]))
        return beside / median_interval(self.before)[1]

    def longer(self, hint: str, block_s: float) -> float:
        """How much longer a call in a block on a GPU may be than a hint, `cold` or `steady`: a block of the baseline, `block_s`
        a call, over the baseline's own such time, but at least 1 and at most `BELIEVED`."""
        own = self.cold_baseline if hint == "cold" else self.steady_baseline
        return min(max(block_s / float(np.median(own)), 1.0), BELIEVED["cuda"])


def columns(case: Case, row: Mapping[str, Any], samples: Samples, device: str) -> Columns:
    """The columns `judged_...` of a row: the median block and, paired by rounds, the ratio to the baseline. On a GPU half of
    the baseline's rounds come before all of the kernel's and half after them, so a drift widens the ratio's interval.

    A row that was measured becomes `unconverged` in three cases:

    - an end of the ratio's interval differs from its middle by more than the factor `BELIEVED`;
    - the median block is longer than a hint times `BELIEVED` (on a GPU, times `Samples.longer` as well);
    - something may have slowed the baseline's blocks. On a GPU: the whole interval of the ratio is above the higher one of the
      hinted ratios times `BELIEVED`. On a CPU: `Samples.held_up` is more than `BELIEVED`. There the hinted ratios say nothing
      about a short kernel, because a block begins with waking the baseline's threads.

    Otherwise it becomes `ok`. A wide interval of the hints does not matter, because the judge's times are the result.
    Any row becomes `impossible` if the median block is shorter than a GPU's peaks allow."""
    op = ops.get(case.op)
    work = Work(op.flops(case), op.bytes(case), op.metric.work(op, case))
    blocks = [samples.kernel, samples.baseline, samples.duplicate]
    medians = [float(np.median(block)) for block in blocks]
    comparison = compare(*blocks)
    found = derive_regime("judged", blocks, comparison, work, *medians[:2])
    if len(samples.beside):
        ratio = compare(samples.kernel, samples.beside, samples.beside)
        found["metrics"] = {BESIDE: ratio.speedup, f"{BESIDE}_low": ratio.low, f"{BESIDE}_high": ratio.high}
    hints = {name: row[f"{name}_us"] for name in REGIMES if row.get(f"{name}_us")}
    longer = {name: samples.longer(name, medians[1]) if device == "cuda" else 1.0 for name in hints}
    allowed = BELIEVED[device] * min(hints[name] * longer[name] for name in hints)
    ratios = [of_baseline / us for name, us in hints.items() if (of_baseline := row.get(f"{name}_baseline_us"))]
    fastest = BELIEVED[device] * max(ratios, default=math.inf) if device == "cuda" else math.inf
    doubt = ""
    if found["judged_us"] > allowed:
        doubt = LONGER.format(found["judged_us"], allowed)
    elif found["judged_speedup_low"] > fastest:
        doubt = FASTER.format(found["judged_speedup_low"], fastest)
    elif device == "cpu" and samples.held_up > BELIEVED[device]:
        doubt = HELD_UP.format(samples.held_up)
    elif (factor := math.exp(comparison.half_width)) > BELIEVED[device]:
        doubt = WIDE.format(factor, len(samples.kernel), BELIEVED[device])
    if row["status"] in ("ok", "unconverged"):
        found |= {"status": "unconverged", "message": doubt} if doubt else {"status": "ok", "message": None}
    # A block begins after a flush and calls on each set of operands once, so it reads all inputs from memory.
    if found["judged_us"] < (floor_us := row.get("floor_us") or 0.0):
        found |= {"status": "impossible", "message": TOO_SHORT.format(found["judged_us"], floor_us)}
    return found


@dataclass(frozen=True)
class Contradiction:
    """A hint that the judge's samples contradict, and by which factor."""

    words: str
    factor: float
    explained: float  # the factor that noise of the machine can explain

    @property
    def proven(self) -> bool:
        return self.factor > self.explained


def contradiction(row: Mapping[str, Any], samples: Samples, device: str) -> Contradiction | None:
    """A contradiction between a row's hints and the judge's samples, or between two of the judge's own times; a proven one if
    there is any. Of several, one of the judge's own times, or else the largest. None if nothing contradicts."""
    believed = BELIEVED[device]
    lag, usual = float(min(samples.lag)), float(max(samples.baseline_lag))
    words = f"its blocks take {lag:.3g} times as long by the clock outside as by the clock inside of its process"
    of_judge = [Contradiction(words, lag, believed * max(usual, 1.0))]
    alone = samples.linked_call()
    blocks_s = float(np.median(samples.kernel))
    if alone is not None:
        words = AT_ONCE.format(blocks_s * 1e6, alone * 1e6)
        of_judge.append(Contradiction(words, alone / blocks_s, believed * samples.spread))
    least = float(min(samples.work if device == "cpu" else samples.kernel)) * 1e6
    slow = float(np.percentile(samples.steady_baseline, 90))
    most = {"steady": max(slow, *samples.baseline, *samples.duplicate) * 1e6}
    most["cold"] = max(float(np.percentile(samples.cold_baseline, 90)) * 1e6, most["steady"])
    found: list[Contradiction] = []
    for name in REGIMES:
        inside, baseline = row.get(f"{name}_us"), row.get(f"{name}_baseline_us")
        if inside is None:
            continue
        blocks = f"at least {least:.4g} us in the judge's blocks"
        words = f"takes {inside:.4g} us ({name}) by the clock inside of its process, but {blocks}"
        usual = inside
        if name == "steady":
            usual = samples.in_a_block(inside * 1e-6) * 1e6
        elif device == "cuda":
            usual = inside * samples.longer("cold", samples.baseline_block)
        found.append(Contradiction(words, least / usual, believed * samples.spread))
        if baseline is not None:
            words = (
                f"the baseline takes {baseline:.4g} us ({name}) inside of the kernel's process and "
                f"at most {most[name]:.4g} us in one without it"
            )
            explained = math.inf if samples.busy and device == "cpu" else believed * samples.spread
            found.append(Contradiction(words, baseline / most[name], explained))
    found.sort(key=lambda doubt: (doubt.proven, doubt.factor), reverse=True)
    doubts = [doubt for doubt in (*of_judge, *found) if doubt.factor > believed]
    return next((doubt for doubt in doubts if doubt.proven), doubts[0] if doubts else None)


def verdict(contradictions: Sequence[Contradiction]) -> Columns:
    """Status and message of a row whose hints every measurement contradicted."""
    least = min(contradictions, key=lambda each: each.factor / each.explained)
    if least.proven:
        return {"status": "dishonest", "message": least.words}
    return {"status": "error", "message": BUSY.format(least.words)}
