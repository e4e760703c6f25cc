"""Calls of a specialiser, and what they come to."""

from __future__ import annotations

import time

import pytest
import torch

from minfer.specialise import Outcome, Specialiser

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
