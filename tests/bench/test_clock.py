"""The GPU's clock: its windows contain the GPU's time and not the host's."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minfer import build, ops
from minfer.bench import device as devices
from minfer.bench.clock import Candidate, CudaClock, Hooks
from minfer.bench.measure import Bench
from minfer.bench.timing import Timing
from minfer.ops import Case

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
    assert times == pytest.approx(KERNEL_S) and not clock.host_bound and not clock.late.any()


def test_a_call_that_waits_for_the_gpu_is_taken_as_it_is_and_said_to_be(monkeypatch):
    machine = Machine()
    clock = machine.clock(monkeypatch)

    def waiting(index: int) -> None:
        torch.cuda.synchronize(clock.device)
        machine.enqueue(50e-6, KERNEL_S)

    times = clock.cold([waiting], np.zeros((30, 1), dtype=int), Hooks())
    assert clock.host_bound and (times > 2 * KERNEL_S).all()
    assert machine.gpu < 1, "once it is known, no round is repeated"


def test_it_says_of_which_candidate_the_windows_may_contain_the_hosts_time(monkeypatch):
    """Beside one that waits for the GPU, a call of many launches is late too, and one that is issued during a flush is not."""
    machine = Machine()
    clock = machine.clock(monkeypatch)

    def waiting(index: int) -> None:
        torch.cuda.synchronize(clock.device)
        machine.enqueue(50e-6, KERNEL_S)

    order = np.array([[0, 1, 2], [2, 1, 0]] * 20)
    times = clock.cold([waiting, machine.kernel(100e-6), machine.kernel(1e-6)], order, Hooks())
    assert clock.late.shape == times.shape and clock.late.all(axis=0).tolist() == [True, True, False]
    assert not clock.late[:, 2].any() and times[:, 2] == pytest.approx(KERNEL_S) and (times[:, 1] > 2 * KERNEL_S).all()
    clock.cold([machine.kernel(1e-6)], np.zeros((3, 1), dtype=int), Hooks())
    assert clock.late.shape == (3, 1) and not clock.late.any()


def test_a_bench_keeps_that_of_all_rounds_it_took(monkeypatch):
    op = ops.get("rmsnorm")
    case = Case("rmsnorm", "torch", "float32", {}, {"tokens": 4, "hidden": 8})
    function = build.function(op.kernels["torch"], "")
    bench = Bench(op, case, function, function, torch.device("cpu"), 1, sets=1)
    machine = Machine()
    bench.clock = clock = machine.clock(monkeypatch)
    kernel, baseline, duplicate = bench.candidates

    def waiting(index: int) -> None:
        kernel(index)
        torch.cuda.synchronize(clock.device)
        machine.enqueue(50e-6, KERNEL_S)

    def quick(candidate: Candidate) -> Candidate:
        return lambda index: (candidate(index), machine.enqueue(1e-6, KERNEL_S))

    bench.candidates = [waiting, quick(baseline), quick(duplicate)]
    for _ in range(2):
        taken = bench.cold(Timing(looks=[6]))
        late = np.concatenate(bench.late)
        assert late.shape == taken.shape == (6, 3) and late.mean(axis=0).tolist() == [1.0, 0.0, 0.0]


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
