"""Calls of a specialiser, and what they come to."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from minfer.specialise import Outcome, Specialiser, trial

FASTER = Outcome("faster", compile_s=1.0, trial_s=1.0, variant_us=1.0, generic_us=2.0, speedup=2.0, low=1.9, high=2.1)


def operands(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((n,), float("nan")), torch.randn(n)


def call(specialiser: Specialiser, n: int) -> float:
    y, x = operands(n)
    specialiser.execute(n, y, x)
    return float("nan") if torch.equal(y, 2 * x) else float(y[0])


def until(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "minfer.specialise"]


# Milliseconds of a call in the blocks of a trial; RESTLESS ones were seen on two cores with two other busy processes.
QUIET_FASTER, QUIET_SLOWER, QUIET_TIE = (1.0, 2.0, 2.02, 1.0), (2.0, 1.0, 1.01, 2.0), (1.0, 1.01, 1.01, 1.0)
RESTLESS = (0.05, 42.7, 34.0, 0.05)


def steady(monkeypatch: pytest.MonkeyPatch, *blocks: tuple[float, ...]) -> list[int]:
    """The next trials measure these steady blocks in turn, then repeat the last. The list says how many were taken."""
    taken: list[int] = []

    def measured(self: object, timing: object, during: object) -> list[np.ndarray]:
        taken.append(len(taken))
        return [np.array([1e-3 * block]) for block in blocks[min(len(taken), len(blocks)) - 1]]

    monkeypatch.setattr(trial.Bench, "steady", measured)
    monkeypatch.setattr(trial.Bench, "warm_up", lambda self, seconds: None)
    return taken
