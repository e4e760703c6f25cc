"""Times against the device's peaks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from minfer import ops
from minfer.child import Child

HGEMM = ops.get("hgemm")
CASE = HGEMM.case("torch", "float16", {"m": 1024, "n": 1024, "k": 1024})
PEAKS = {"read_gbps": 1000.0, "copy_gbps": 1000.0, "mma_float16_float32": 100.0, "mma_float16_float32_mhz": 1000.0}
READING_US, MULTIPLYING_US = 2 * 2**21 / 1e12 * 1e6, 2 * 2**30 / 100e12 * 1e6


def held(cold_us: float, steady_us: float, device: str = "cuda", fastest: float | None = 1000.0):
    child = object.__new__(Child)
    child.device, child.peaks = torch.device(device), PEAKS
    child.telemetry = SimpleNamespace(max_sm_mhz=lambda: fastest)
    row = {"status": "ok", "flops": HGEMM.case_flops(CASE), "bytes": HGEMM.case_bytes(CASE)}
    row |= {"cold_us": cold_us, "steady_us": steady_us}
    child._hold_against_peaks(HGEMM, CASE, 2 * 2**21, row)
    return row


def test_a_possible_time_has_its_share_of_the_peak() -> None:
    row = held(2 * MULTIPLYING_US, 4 * MULTIPLYING_US)
    assert row["status"] == "ok"
    assert row["cold_percent_of_peak"] == pytest.approx(50)
    assert row["steady_percent_of_peak"] == pytest.approx(25)
    assert 0.9 * MULTIPLYING_US < row["floor_us"] < MULTIPLYING_US


@pytest.mark.parametrize("regime", ["cold", "steady"])
def test_a_time_below_the_floor_is_impossible(regime: str) -> None:
    times = {"cold": 30.0, "steady": 30.0} | {regime: 0.5 * MULTIPLYING_US}
    row = held(times["cold"], times["steady"])
    assert row["status"] == "impossible"
    assert f"the {regime} time of" in row["message"] and "peaks allow" in row["message"]


def test_a_higher_clock_lowers_the_floor() -> None:
    assert held(0.6 * MULTIPLYING_US, 30, fastest=2000.0)["status"] == "ok"
    unknown = held(0.9 * READING_US, 30, fastest=None)
    assert unknown["status"] == "impossible" and math.isclose(unknown["floor_us"], READING_US / 1.05)
    assert held(1.1 * READING_US, 1e-3, fastest=None)["status"] == "ok"  # steady inputs may be in the cache


def test_nothing_is_impossible_for_a_cpu() -> None:
    row = held(1e-6, 1e-6, device="cpu")
    assert row["status"] == "ok" and "floor_us" not in row and "cold_percent_of_peak" not in row
