"""Ratios, intervals and verdicts: exact where theory gives the number, simulated where it does not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from minfer.bench.stats import Comparison, compare, median_interval
from minfer.rows.rules import LEAST_GAIN

Sampler = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def ranks(n: int, confidence: float = 0.95) -> tuple[int, int]:
    """Which order statistics of n samples the interval consists of, from 0."""
    low, high = median_interval(np.arange(n, dtype=float), confidence)
    return int(low), int(high)


# The interval of a median


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_ranks_are_the_tightest_that_the_binomial_tail_allows(confidence: float) -> None:
    miss = round((1 - confidence) * 1000)  # of 1000, so that everything below is whole numbers
    for n in [*range(1, 301), 499, 1000, 1023, 1024, 1075, 2048, 3000]:
        # The interval misses on one side when at most `rank` samples are on that side of the median.
        total, tail, rank = 2**n * miss, 0, -1
        while 2000 * (tail := tail + math.comb(n, rank + 1)) <= total:
            rank += 1
        assert ranks(n, confidence) == (max(rank, 0), n - 1 - max(rank, 0)), n


@pytest.mark.parametrize(
    ("n", "expected"), [(1, (0, 0)), (5, (0, 4)), (6, (0, 5)), (9, (1, 7)), (10, (1, 8)), (20, (5, 14)), (30, (9, 20)),
                        (60, (21, 38)), (120, (48, 71))]
)  # fmt: skip
def test_ranks_of_the_published_tables(n: int, expected: tuple[int, int]) -> None:
    """Counted from 1, tables of the 95 % interval give the 2nd and 9th of 10, the 6th and 15th of 20, and so on."""
    assert ranks(n) == expected


def test_too_few_samples_give_their_whole_range() -> None:
    for n in range(1, 6):
        assert ranks(n) == (0, n - 1)


def test_every_number_of_samples_up_to_3000_gives_a_symmetric_interval_that_tightens() -> None:
    widths = []
    for n in range(1, 3001):
        low, high = ranks(n)
        assert 0 <= low <= high == n - 1 - low
        widths.append((high - low) / n)
    assert widths[2999] < 0.04 < widths[299] < 0.15 < widths[29] < 0.5


def test_the_order_of_the_samples_does_not_matter_and_they_are_left_alone() -> None:
    samples = np.random.default_rng(0).normal(size=31)
    kept = samples.copy()
    assert median_interval(samples) == median_interval(samples[::-1]) == median_interval(np.sort(samples))
    assert np.array_equal(samples, kept)


DISTRIBUTIONS: dict[str, tuple[Sampler, float]] = {  # and their medians
    "normal": (lambda rng, size: rng.normal(3, 2, size), 3.0),
    "exponential": (lambda rng, size: rng.exponential(1, size), math.log(2)),
    "lognormal": (lambda rng, size: rng.lognormal(0, 1.5, size), 1.0),
    "cauchy": (lambda rng, size: rng.standard_cauchy(size), 0.0),
    "mostly one value": (lambda rng, size: np.maximum(rng.normal(0, 1, size), -0.5), 0.0),
    "a tenth are outliers": (
        lambda rng, size: rng.uniform(0, 10 / 9, size) + 100 * (rng.uniform(size=size) < 0.1), math.nan),
}  # fmt: skip


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("n", [6, 10, 30, 60, 120, 240])
def test_the_interval_covers_the_median_of_any_distribution_at_least_19_times_in_20(name: str, n: int) -> None:
    sample, median = DISTRIBUTIONS[name]
    rng = np.random.default_rng(n)
    if math.isnan(median):
        median = float(np.median(sample(rng, (1_000_000, 1))))
    times = 2000
    covered = 0
    for samples in sample(rng, (times, n)):
        low, high = median_interval(samples)
        covered += low <= median <= high
    least = 0.95 - 3 * math.sqrt(0.95 * 0.05 / times)
    assert covered / times >= least
    assert covered / times <= 0.99 or n < 10  # and is not simply wide


# Verdicts


def verdict(low: float, high: float, aa_spread: float) -> str:
    return Comparison(math.sqrt(low * high), low, high, aa_spread).verdict


@pytest.mark.parametrize(
    ("low", "high", "aa_spread", "expected"),
    [
        (0.99, 1.01, 0.0, "tie"),
        (1.001, 1.005, 0.0, "tie"),  # certain, and too little to matter
        (1.009, 1.30, 0.0, "tie"),
        (1.011, 1.30, 0.0, "faster"),
        (1.011, 1.30, 0.02, "tie"),  # the baseline differs as much from itself
        (1.021, 1.30, 0.02, "faster"),
        (0.98, 1.30, 0.0, "tie"),
        (0.995, 0.999, 0.0, "tie"),
        (0.70, 0.991, 0.0, "tie"),
        (0.70, 0.989, 0.0, "slower"),
        (0.70, 0.989, 0.02, "tie"),
        (0.70, 0.979, 0.02, "slower"),
        (0.50, 2.00, 0.0, "tie"),
        (1.0, 1.0, 0.0, "tie"),
    ],
)
def test_a_verdict_needs_one_percent_and_more_than_the_control_shows(
    low: float, high: float, aa_spread: float, expected: str
) -> None:
    assert verdict(low, high, aa_spread) == expected


@given(gain=st.floats(0, 2), width=st.floats(0, 1), spread=st.floats(0, 0.5))
def test_faster_and_slower_are_mirror_images(gain: float, width: float, spread: float) -> None:
    low, high = math.exp(gain - width), math.exp(gain + width)
    mirrored = {"faster": "slower", "slower": "faster", "tie": "tie"}
    needed = math.log1p(max(LEAST_GAIN, spread))
    if abs(gain - width - needed) > 1e-9:  # the edge itself is a matter of rounding
        assert verdict(1 / high, 1 / low, spread) == mirrored[verdict(low, high, spread)]


def test_half_width_is_relative() -> None:
    assert Comparison(1.0, 0.995, 1.005, 0).half_width == pytest.approx(0.005, rel=1e-3)
    assert Comparison(7.0, 6.965, 7.035, 0).half_width == pytest.approx(0.005, rel=1e-3)


# Comparing


def noisy(rng: np.random.Generator, scale: float, n: int, noise: float = 0.01) -> np.ndarray:
    """Times as they are: a floor, skewed noise above it, and now and then an interruption."""
    return scale * (1 + noise * rng.exponential(1, n)) * np.where(rng.uniform(size=n) < 0.03, 2.0, 1.0)


@pytest.mark.parametrize("noise", [0.001, 0.01, 0.05])
@pytest.mark.parametrize("n", [10, 30, 120])
def test_a_kernel_against_itself_is_a_tie(n: int, noise: float) -> None:
    rng = np.random.default_rng(n)
    verdicts = Counter(compare(*(noisy(rng, 1e-4, n, noise) for _ in range(3))).verdict for _ in range(400))
    assert verdicts["tie"] >= 0.95 * 400
    assert noise > 0.01 or verdicts["tie"] == 400


@pytest.mark.parametrize("n", [30, 60, 120])
@pytest.mark.parametrize("speedup", [5.0, 1.2, 1.02, 1 / 1.02, 1 / 1.2, 0.01])
def test_a_difference_is_found_in_its_direction_and_size(speedup: float, n: int) -> None:
    rng = np.random.default_rng(7)
    expected = "faster" if speedup > 1 else "slower"
    for _ in range(100):
        baseline, duplicate, kernel = (noisy(rng, scale, n, 0.003) for scale in (1e-4, 1e-4, 1e-4 / speedup))
        found = compare(kernel, baseline, duplicate)
        assert found.verdict == expected
        assert found.low <= found.speedup <= found.high
        assert found.speedup == pytest.approx(speedup, rel=0.003)


@pytest.mark.parametrize("noise", [0.003, 0.05])
@pytest.mark.parametrize("n", [30, 120, 240])
def test_the_interval_covers_the_true_speedup_also_when_the_noise_is_skewed(n: int, noise: float) -> None:
    rng = np.random.default_rng(11)
    times = 1000
    covered = 0
    for _ in range(times):
        baseline, duplicate, kernel = (noisy(rng, scale, n, noise) for scale in (1.0, 1.0, 1 / 1.2))
        found = compare(kernel, baseline, duplicate)
        covered += found.low <= 1.2 <= found.high
    assert covered / times >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / times)


def test_a_drift_that_all_candidates_share_cancels() -> None:
    rng = np.random.default_rng(3)
    n = 60
    quiet = [noisy(rng, scale, n, 0.002) for scale in (1 / 1.02, 1.0, 1.0)]
    clock = np.exp(0.3 * np.sin(np.linspace(0, 9, n)) + 0.1 * rng.normal(size=n).cumsum())
    drifting = [times * clock for times in quiet]
    still, moved = compare(*quiet), compare(*drifting)
    for name in ("speedup", "low", "high", "aa_spread"):
        assert getattr(moved, name) == pytest.approx(getattr(still, name), rel=1e-9, abs=1e-9)
    assert moved.verdict == "faster" and moved.half_width < 0.005
    low, high = median_interval(drifting[0])
    assert high / low > 1.1  # unpaired, the 2 % would drown


def test_a_drift_of_one_candidate_alone_does_not_cancel() -> None:
    rng = np.random.default_rng(3)
    kernel, baseline, duplicate = (noisy(rng, 1.0, 60, 0.002) for _ in range(3))
    assert compare(kernel * np.linspace(1, 1.5, 60), baseline, duplicate).verdict == "slower"


def test_a_gain_within_the_spread_of_the_control_is_a_tie() -> None:
    rng = np.random.default_rng(5)
    kernel, baseline, duplicate = (noisy(rng, scale, 60, 0.001) for scale in (1 / 1.05, 1.0, 1.0))
    assert compare(kernel, baseline, duplicate).verdict == "faster"
    for shift in (1.12, 1 / 1.12):
        shifted = compare(kernel, baseline, duplicate * shift)
        assert shifted.aa_spread == pytest.approx(0.12, abs=0.003)
        assert shifted.verdict == "tie"


def test_the_control_says_nothing_of_the_kernel() -> None:
    rng = np.random.default_rng(6)
    kernel, baseline, duplicate = (noisy(rng, 1.0, 60) for _ in range(3))
    assert compare(kernel, baseline, duplicate).aa_spread == compare(9 * kernel**2, baseline, duplicate).aa_spread


times = arrays.arrays(float, st.shared(st.integers(1, 40), key="rounds"), elements=st.floats(1e-6, 1.0))
factors = st.floats(1e-3, 1e3)


def close(a: Comparison, b: Comparison, factor: float = 1.0) -> bool:
    """Whether a is b with its speedups multiplied by a factor."""
    pairs = [(a.speedup, b.speedup * factor), (a.low, b.low * factor), (a.high, b.high * factor)]
    return all(math.isclose(x, y, rel_tol=1e-9) for x, y in [*pairs, (1 + a.aa_spread, 1 + b.aa_spread)])


@settings(deadline=None)
@given(kernel=times, baseline=times, duplicate=times, factor=factors)
def test_scaling(kernel: np.ndarray, baseline: np.ndarray, duplicate: np.ndarray, factor: float) -> None:
    """A faster clock for all changes nothing; a kernel that takes c times as long has a c times lower speedup."""
    found = compare(kernel, baseline, duplicate)
    assert close(compare(kernel * factor, baseline * factor, duplicate * factor), found)
    assert close(compare(kernel * factor, baseline, duplicate), found, 1 / factor)


@settings(deadline=None)
@given(kernel=times, baseline=times, duplicate=times, seed=st.integers(0, 99))
def test_neither_the_order_of_rounds_nor_which_candidate_is_called_the_duplicate_matters(
    kernel: np.ndarray, baseline: np.ndarray, duplicate: np.ndarray, seed: int
) -> None:
    found = compare(kernel, baseline, duplicate)
    order = np.random.default_rng(seed).permutation(len(kernel))
    assert close(compare(kernel[order], baseline[order], duplicate[order]), found)
    assert math.isclose(1 + compare(kernel, duplicate, baseline).aa_spread, 1 + found.aa_spread, rel_tol=1e-9)


@settings(deadline=None)
@given(kernel=times, baseline=times, duplicate=times, delay=times)
def test_a_slower_sample_never_makes_a_kernel_look_faster(
    kernel: np.ndarray, baseline: np.ndarray, duplicate: np.ndarray, delay: np.ndarray
) -> None:
    before, after = compare(kernel, baseline, duplicate), compare(kernel + delay, baseline, duplicate)
    assert after.speedup <= before.speedup and after.low <= before.low and after.high <= before.high
    rank = {"slower": 0, "tie": 1, "faster": 2}
    assert rank[after.verdict] <= rank[before.verdict]


@settings(deadline=None)
@given(kernel=times, baseline=times, duplicate=times)
def test_the_interval_encloses_the_speedup_and_is_positive(
    kernel: np.ndarray, baseline: np.ndarray, duplicate: np.ndarray
) -> None:
    found = compare(kernel, baseline, duplicate)
    assert 0 < found.low <= found.speedup <= found.high < math.inf
    assert found.half_width >= 0 and found.aa_spread >= 0
