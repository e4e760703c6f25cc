"""From paired samples to a ratio, its confidence interval and a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from minfer.rows.rules import LEAST_GAIN


@cache
def _order_statistics(n: int, confidence: float) -> tuple[int, int]:
    """The 0-based ranks whose order statistics enclose the median of n samples with at least that confidence.

    The number of samples below the median is Binomial(n, 1/2), so the interval is exact for any distribution (David
    and Nagaraja, Order Statistics, section 7.1). With too few samples for that confidence, the whole range.
    """
    tail, below = (1 - confidence) / 2, 0.0
    for rank in range(n // 2):
        below += math.exp(math.lgamma(n + 1) - math.lgamma(rank + 1) - math.lgamma(n - rank + 1) - n * math.log(2))
        if below > tail:
            return max(rank - 1, 0), n - 1 - max(rank - 1, 0)
    return 0, n - 1


def median_interval(samples: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """A distribution-free confidence interval of the median of independent samples."""
    low, high = _order_statistics(len(samples), confidence)
    ordered = np.sort(samples)
    return float(ordered[low]), float(ordered[high])


@dataclass(frozen=True)
class Comparison:
    """A kernel against its baseline. `speedup` is the baseline's time over the kernel's: above 1 is faster.

    `aa_spread` is the control: how far from 1 the interval of the baseline against its own duplicate reaches.
    """

    speedup: float
    low: float
    high: float
    aa_spread: float
    least: float = LEAST_GAIN  # a smaller difference is a tie

    @property
    def half_width(self) -> float:
        """Of the interval, relative."""
        return (math.log(self.high) - math.log(self.low)) / 2

    @property
    def verdict(self) -> str:
        """`faster` or `slower` when the whole interval is beyond `least` and what the control shows, else `tie`."""
        needed = math.log1p(max(self.least, self.aa_spread))
        if math.log(self.low) > needed:
            return "faster"
        return "slower" if math.log(self.high) < -needed else "tie"


def compare(kernel: np.ndarray, baseline: np.ndarray, duplicate: np.ndarray) -> Comparison:
    """Paired comparison of times taken in the same rounds; all arrays have shape (rounds,).

    The kernel is paired with the baseline alone. Pairing it with the mean of baseline and duplicate looks better and
    is wrong: times are skewed, the median of a mean of two lies above the median of one, and a kernel then seems faster
    than itself (on an H200, in 13 % of 200 comparisons)."""
    gain = np.log(baseline) - np.log(kernel)
    low, high = median_interval(gain)
    control = median_interval(np.log(baseline) - np.log(duplicate))
    spread = math.expm1(max(abs(control[0]), abs(control[1])))
    return Comparison(math.exp(float(np.median(gain))), math.exp(low), math.exp(high), spread)


def compare_blocks(times: Sequence[float], least: float = LEAST_GAIN) -> Comparison:
    """Comparison of four steady blocks by the time (or joules) of one call in each: kernel, baseline, baseline's duplicate,
    kernel (ABBA). The interval is the range over the two pairs of neighbours."""
    first, baseline, duplicate, second = times
    low, high = sorted((baseline / first, duplicate / second))
    return Comparison(math.sqrt(low * high), low, high, math.expm1(abs(math.log(baseline / duplicate))), least)
