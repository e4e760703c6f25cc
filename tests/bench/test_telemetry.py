"""Power from the moves of an energy counter."""

from __future__ import annotations

import pytest

from minfer.bench.telemetry import watts

EVERY_TENTH = [(0.1 * i, 30.0 * i) for i in range(8)]  # 300 W


def test_power_is_the_joules_between_two_moves_over_whole_ticks() -> None:
    seen_late = [(at + (0.004 if i % 3 == 1 else 0.0), joules) for i, (at, joules) in enumerate(EVERY_TENTH)]
    assert watts(seen_late, 0.15, 0.65) == pytest.approx(300, rel=0.01)
    assert watts(EVERY_TENTH, 0.15, 0.25) is None, "one move"
    assert watts(EVERY_TENTH[:2], 0.0, 1.0) is None


def test_two_moves_at_once_are_no_power() -> None:
    at_once = sorted([*EVERY_TENTH, (0.302, 91.0)])
    assert watts(at_once, 0.29, 0.31) is None
    assert watts(at_once, 0.0, 0.7) == pytest.approx(300, rel=0.01)
