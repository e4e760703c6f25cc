"""The GPU's clock: its windows contain the GPU's time and not the host's."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minfer.bench import device as devices
from minfer.bench.clock import CudaClock, Hooks

FLUSH_S, KERNEL_S, CYCLE_S = 30e-6, 10e-6, 0.5e-9


class Machine:
    """A host and a GPU that takes what is in its queue, in order; each has a time of its own, in seconds."""

    def __init__(self) -> None:
        self.host = self.gpu = 0.0

    def enqueue(self, host_s: float, gpu_s: float) -> float:
        """The host takes so long to put into the queue what takes the GPU so long. Returns when the GPU is done."""
        self.host += host_s
        self.gpu = max(self.gpu, self.host) + gpu_s
        return self.gpu

    def event(self) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.enqueue(1e-6, 0.0))
        event.query = lambda: event.at <= self.host
        event.elapsed_time = lambda other: (other.at - event.at) * 1e3
        return event

    def clock(self, monkeypatch: pytest.MonkeyPatch) -> CudaClock:
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self.event())
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.enqueue(5e-6, cycles * CYCLE_S))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(self, "host", max(self.host, self.gpu)))
        clock = object.__new__(CudaClock)
        clock.device, clock.host_bound = torch.device("cuda"), False
        monkeypatch.setattr(clock, "flush", lambda: self.enqueue(10e-6, FLUSH_S), raising=False)
        return clock

    def kernel(self, host_s: float) -> Callable[[int], object]:
        return lambda index: self.enqueue(host_s, KERNEL_S)


@pytest.mark.parametrize("host_us", [5, 100, 3_000, 20_000, 50_000])
def test_no_window_contains_the_time_of_a_slow_host(host_us, monkeypatch):
    machine = Machine()
    clock = machine.clock(monkeypatch)
    order = np.array([[0, 1], [1, 0]] * 60)
    times = clock.cold([machine.kernel(host_us * 1e-6), machine.kernel(1e-6)], order, Hooks())
    assert times == pytest.approx(KERNEL_S) and not clock.host_bound


def test_a_call_that_waits_for_the_gpu_is_taken_as_it_is_and_said_to_be(monkeypatch):
    machine = Machine()
    clock = machine.clock(monkeypatch)

    def waiting(index: int) -> None:
        torch.cuda.synchronize(clock.device)
        machine.enqueue(50e-6, KERNEL_S)

    times = clock.cold([waiting], np.zeros((30, 1), dtype=int), Hooks())
    assert clock.host_bound and (times > 2 * KERNEL_S).all()
    assert machine.gpu < 1, "once it is known, no round is repeated"


def test_each_round_that_is_repeated_is_watched_like_the_first(monkeypatch):
    machine = Machine()
    clock = machine.clock(monkeypatch)
    seen = []

    class Watching(Hooks):
        before_round = lambda self: seen.append("before")
        after_round = lambda self: seen.append("after")

    clock.cold([machine.kernel(3e-3)], np.zeros((2, 1), dtype=int), Watching())
    assert len(seen) > 4 and seen == ["before", "after"] * (len(seen) // 2)


@pytest.mark.timing
@pytest.mark.gpu
def test_gpu_no_window_contains_the_time_of_a_slow_host():
    clock = CudaClock(devices.pick("cuda"))
    matrix = torch.ones(64, 64, device="cuda")

    def slow(index: int) -> None:
        time.sleep(3e-3)
        matrix.add_(1)

    order = np.zeros((20, 1), dtype=int)
    times, quick = clock.cold([slow], order, Hooks()), clock.cold([lambda index: matrix.add_(1)], order, Hooks())
    assert not clock.host_bound
    assert np.median(times) < 3 * np.median(quick) and times.max() < 1e-3


@pytest.mark.timing
@pytest.mark.gpu
def test_gpu_a_call_that_waits_for_the_gpu_is_said_to_be():
    clock = CudaClock(devices.pick("cuda"))
    clock.cold([lambda index: torch.cuda.synchronize()], np.zeros((5, 1), dtype=int), Hooks())
    assert clock.host_bound
