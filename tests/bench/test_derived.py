"""What follows from samples, and what the device's peaks say of it."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from minfer import ops
from minfer.bench.derived import derive
from minfer.bench.timing import Timing
from minfer.rows import store

HGEMM = ops.get("hgemm")
CASE = HGEMM.case("torch", "float16", {"m": 1024, "n": 1024, "k": 1024})
PEAKS = {"read_gbps": 1000.0, "copy_gbps": 1000.0, "mma_float16_float32": 100.0, "mma_float16_float32_mhz": 1000.0}
READING_US, MULTIPLYING_US = 2 * 2**21 / 1e12 * 1e6, 2 * 2**30 / 100e12 * 1e6


def columns(cold_us: float, steady_us: float, fastest: float | None = 1000.0, cuda: bool = True) -> dict[str, Any]:
    roofs = PEAKS | ({"max_sm_mhz": fastest} if fastest else {})
    cold, steady = [[cold_us * 1e-6] * 3] * 30, [[steady_us * 1e-6] * 5] * 4
    return derive(CASE, cold, steady, [], Timing(), roofs if cuda else None)


def test_columns_follow_from_the_samples() -> None:
    rng = np.random.default_rng(0)
    cold = rng.lognormal(size=(31, 3)) * 1e-5 * [1.0, 2.0, 2.0]
    steady = [[2e-5, 4e-5, 9e-5], [5e-5], [9e-5], [3e-5]]
    row = derive(CASE, cold.tolist(), steady, [], Timing(), None)
    store.to_table([row])
    assert row["cold_us"] == pytest.approx(np.median(cold[:, 0]) * 1e6)
    assert row["cold_tflops"] == pytest.approx(2 * 1024**3 / np.median(cold[:, 0]) / 1e12)
    assert row["cold_speedup"] == pytest.approx(np.median(cold[:, 1] / cold[:, 0]))
    assert row["cold_rounds"] == 31 and row["status"] == "unconverged" and "after 31 rounds" in row["message"]
    assert row["steady_blocks"] == [3, 1, 1, 1]
    assert row["steady_samples_us"] == pytest.approx([20, 40, 90, 30])
    assert row["steady_us"] == pytest.approx(math.sqrt(40 * 30))
    assert row["steady_baseline_us"] == pytest.approx(math.sqrt(50 * 90))
    assert row["steady_speedup"] == pytest.approx(row["steady_baseline_us"] / row["steady_us"])
    assert row["steady_speedup_low"] == pytest.approx(5 / 4) and row["steady_speedup_high"] == pytest.approx(3)


@pytest.mark.parametrize(
    ("us", "cuda", "status"),
    [(7.0, True, "ok"), (70.0, True, "unconverged"), (7.0, False, "unconverged")],
)
def test_a_row_is_unconverged_only_beyond_what_the_clock_resolves(us: float, cuda: bool, status: str) -> None:
    """The ratio is known to about 1.4 %: a tenth of a microsecond of 7, which no CUDA event tells, or a whole one of 70."""
    kernel = us * 1e-6 * np.where(np.arange(120) % 2, 1.014, 1 / 1.014)
    cold = np.stack([kernel, np.full(120, us * 1e-6), np.full(120, us * 1e-6)], axis=1)
    row = derive(CASE, cold.tolist(), [], [], Timing(precision=0.005), {} if cuda else None)
    assert row["status"] == status
    if status != "ok":
        clock = r"0.71% \(0.5 µs\)" if cuda else r"\S+% \(\S+ µs\)"
        said = rf"after 120 rounds the ratio is known to ±1.39%; asked for ±0.50%, and the clock resolves {clock}"
        assert re.fullmatch(said, row["message"]), row["message"]


def test_a_steady_time_is_a_mean_on_a_gpu_and_a_median_on_a_cpu() -> None:
    """A GPU's clock swings within a block; on a CPU some calls are interrupted."""
    blocks = [[2e-5, 3e-5, 7e-5], [5e-5, 5e-5, 8e-5], [5e-5, 5e-5, 8e-5], [2e-5, 3e-5, 7e-5]]

    def row(peaks: dict[str, float] | None) -> dict[str, Any]:
        return derive(CASE, [[1e-4] * 3] * 30, blocks, [100.0] * 4, Timing(), peaks)

    gpu, cpu = row({}), row(None)
    assert [gpu["steady_us"], gpu["steady_baseline_us"]] == pytest.approx([40, 60])
    assert [cpu["steady_us"], cpu["steady_baseline_us"]] == pytest.approx([30, 50])
    assert gpu["steady_joules"] == pytest.approx(100 * 40e-6)
    assert gpu["energy_gain"] == pytest.approx(1.5) and gpu["steady_tflops"] == pytest.approx(2 * 1024**3 / 40e6)


def test_without_a_steady_regime_there_is_none() -> None:
    row = derive(CASE, [[1e-5] * 3] * 30, [], [], Timing(), PEAKS)
    assert row["status"] == "ok" and not any(name.startswith("steady_") for name in row)


@pytest.mark.parametrize(
    ("cold", "steady"),
    [
        ([], []),
        ([[1.0, 1.0]], []),
        ([[1.0, 1.0, 0.0]], []),
        ([[1.0, 1.0, -1.0]], []),
        ([[1.0, 1.0, math.inf]], []),
        ([[1.0, 1.0, math.nan]], []),
        ([[1.0, 1.0, "fast"]], []),
        ([[1.0, 1.0, 1.0], [1.0]], []),
        ([[1.0, 1.0, 1.0]], [[1.0]] * 3),
        ([[1.0, 1.0, 1.0]], [[1.0], [1.0], [], [1.0]]),
    ],
)
def test_what_no_clock_gives_is_refused(cold: Any, steady: Any) -> None:
    with pytest.raises(ValueError):
        derive(CASE, cold, steady, [], Timing(), None)


def test_a_possible_time_has_its_share_of_the_peak() -> None:
    row = columns(2 * MULTIPLYING_US, 4 * MULTIPLYING_US)
    assert row["status"] == "ok"
    assert row["cold_percent_of_peak"] == pytest.approx(50)
    assert row["steady_percent_of_peak"] == pytest.approx(25)
    assert 0.9 * MULTIPLYING_US < row["floor_us"] < MULTIPLYING_US


@pytest.mark.parametrize("regime", ["cold", "steady"])
def test_a_time_below_the_floor_is_impossible(regime: str) -> None:
    times = {"cold": 30.0, "steady": 30.0} | {regime: 0.5 * MULTIPLYING_US}
    row = columns(times["cold"], times["steady"])
    assert row["status"] == "impossible"
    assert f"the {regime} time of" in row["message"] and "peaks allow" in row["message"]


def test_a_higher_clock_lowers_the_floor() -> None:
    assert columns(0.6 * MULTIPLYING_US, 30, fastest=2000.0)["status"] == "ok"
    unknown = columns(0.9 * READING_US, 30, fastest=None)
    assert unknown["status"] == "impossible" and math.isclose(unknown["floor_us"], READING_US / 1.05)
    assert columns(1.1 * READING_US, 1e-3, fastest=None)["status"] == "ok"  # steady inputs may be in the cache


def test_nothing_is_impossible_for_a_cpu() -> None:
    row = columns(1e-6, 1e-6, cuda=False)
    assert row["status"] == "ok" and "floor_us" not in row and "cold_percent_of_peak" not in row


def test_a_short_steady_block_at_the_power_limit_settles_no_small_difference() -> None:
    """The clock swings about once a second there: 3 % in blocks of 0.25 s is a tie, in blocks of 2 s it is not."""
    blocks = [[us * 1e-6] * 9 for us in (97.0, 100.0, 100.0, 97.0)]

    def verdict(seconds: float, throttle: str) -> str:
        timing = Timing(steady_block_s=seconds)
        return derive(CASE, [[1e-4] * 3] * 30, blocks, [], timing, None, throttle)["steady_verdict"]

    assert verdict(0.25, "power_cap") == verdict(0.25, "sw_thermal+power_cap") == "tie"
    assert verdict(2.0, "power_cap") == verdict(0.25, "") == "faster"
