"""Taking times, on a GPU and on a CPU, behind one small interface.

`cold` times single calls after the caches were flushed: what a kernel costs when its operands come from memory.
`steady` times calls back to back over rotated operands, long enough for the device to settle at the clock and power
of this one kernel. They differ on a power-limited GPU, and both are true.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import numpy as np
import torch

from minfer.bench.device import cache_bytes

# A call on the operands of set number i.
Candidate = Callable[[int], object]
Restore = Callable[[int], None] | None

FLUSH_FACTOR = 2  # the flush touches this many times the last-level cache
GRAPH_S = 0.002  # a replay so long costs nothing to launch beside what it runs
LEAD_CYCLES, LEADS = 2_000_000, 7  # a millisecond or so; for a slow host that, twice that, and so on: to 64
CPU_FLUSH_LIMIT = 256 << 20  # servers with a gigabyte of L3 would take longer to flush than to measure


class Hooks:
    """What a bench does around the windows, outside of the time; by default nothing."""

    def before_round(self) -> None: ...
    def before_call(self, candidate: int, index: int) -> None: ...
    def after_call(self, candidate: int, index: int) -> None: ...
    def after_round(self) -> None: ...


class Clock(Protocol):
    """All times are in seconds."""

    def flush(self) -> None:
        """Evict everything from the last-level cache."""

    def cold(self, candidates: Sequence[Candidate], order: np.ndarray, hooks: Hooks) -> np.ndarray:
        """Time rounds of single calls. `order` (rounds, candidates) says in which order each round takes the candidates; the
        result has the same shape, and column i holds the times of candidate i."""

    def empty(self, rounds: int) -> float:
        """What a cold window reads with nothing in it."""

    def steady(
        self, candidate: Candidate, rotations: int, seconds: float, during: Callable[[], None], restore: Restore = None
    ) -> np.ndarray:
        """Run a candidate back to back for so long, and return the times of one call in the settled second half of it.
        `during` is called once while the candidate is running. `restore(i)` gives set number i its contents back, untimed,
        before a candidate is called on it again."""

    def again(self, candidate: Candidate, rotations: int, restore: Restore = None) -> tuple[float, float]:
        """Run a steady candidate once more over the sets of operands that `steady` used; the time of one call, and the CPU
        time of all threads of this process in it (on a GPU the same time again)."""


class CudaClock:
    """CUDA events on the current stream. One serves the candidates of one bench: it keeps what it captured of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.ones(FLUSH_FACTOR * cache_bytes(device) // 4, dtype=torch.int32, device=device)
        self._sink = torch.zeros((), dtype=torch.int64, device=device)
        # A round stayed late after all its repeats: a call waits for the GPU, or keeps the host too long. From then on late
        # rounds are not repeated.
        self.host_bound = False
        # Of the last `cold`, like its result: whether the GPU came to a window's begin before all of it was in the queue.
        self.late = np.empty((0, 0), dtype=bool)
        self._loops: dict[int, Loop] = {}  # a candidate has several blocks

    def flush(self) -> None:
        # Reading evicts everything and leaves clean lines. Writing would leave the cache full of dirty ones, whose way
        # back to memory falls into the window: on an H200 a 1x4096x4096 product then reads 18.7 us instead of 15.3.
        torch.sum(self.buffer, dim=0, out=self._sink)

    def cold(self, candidates: Sequence[Candidate], order: np.ndarray, hooks: Hooks) -> np.ndarray:
        events = [[(_event(), _event()) for _ in candidates] for _ in order]
        torch.cuda._sleep(LEAD_CYCLES)  # the GPU waits while the queue fills
        self.late = np.zeros(order.shape, dtype=bool)
        for round_events, sequence, late in zip(events, order, self.late, strict=True):
            late[:] = self._round(candidates, round_events, sequence, hooks)
            for doubled in range(LEADS):
                if self.host_bound or not late.any():
                    break
                torch.cuda._sleep(LEAD_CYCLES << doubled)
                late[:] = self._round(candidates, round_events, sequence, hooks)
            self.host_bound |= bool(late.any())
        torch.cuda.synchronize(self.device)
        return np.array([[begin.elapsed_time(end) * 1e-3 for begin, end in row] for row in events])

    def _round(
        self,
        candidates: Sequence[Candidate],
        events: Sequence[Sequence[torch.cuda.Event]],
        sequence: np.ndarray,
        hooks: Hooks,
    ) -> np.ndarray:
        """Which candidates' windows may contain the host's time: the GPU came to the begin before all was in the queue."""
        late = np.zeros(len(candidates), dtype=bool)
        hooks.before_round()
        for candidate in sequence:
            begin, end = events[candidate]
            hooks.before_call(candidate, 0)
            self.flush()
            begin.record()
            candidates[candidate](0)
            end.record()
            late[candidate] = begin.query()
            hooks.after_call(candidate, 0)
        hooks.after_round()
        return late

    def empty(self, rounds: int) -> float:
        return self._median(lambda index: None, rounds)

    def launch(self, rounds: int) -> float:
        """What a cold window reads with an empty kernel in it: of one thread, which reads a clock and returns."""
        return self._median(lambda index: torch.cuda._sleep(0), rounds)

    def _median(self, candidate: Candidate, rounds: int) -> float:
        return float(np.median(self.cold([candidate], np.zeros((rounds, 1), dtype=int), Hooks())))

    def steady(
        self, candidate: Candidate, rotations: int, seconds: float, during: Callable[[], None], restore: Restore = None
    ) -> np.ndarray:
        if id(candidate) not in self._loops:
            self._loops[id(candidate)] = self._capture(candidate, rotations, restore)
        loop = self._loops[id(candidate)]
        replays = max(1, round(seconds / (loop.calls * loop.call_s + loop.restore_s)))
        if loop.restore is None:
            marks = [_event() for _ in range(replays + 1)]
            windows = list(itertools.pairwise(marks))
            marks[0].record()
        else:
            windows = [(_event(), _event()) for _ in range(replays)]
        for begin, end in windows:
            if loop.restore is not None:
                loop.restore.replay()
                begin.record()
            loop.graph.replay()
            end.record()
        windows[replays * 3 // 4][0].synchronize()
        during()
        torch.cuda.synchronize(self.device)
        times = [begin.elapsed_time(end) * 1e-3 / loop.calls for begin, end in windows]
        return np.array(times[replays // 2 :])

    def again(self, candidate: Candidate, rotations: int, restore: Restore = None) -> tuple[float, float]:
        loop = self._loops[id(candidate)]
        if loop.restore is not None:
            loop.restore.replay()
        seconds = self._time(loop.graph) / loop.calls
        return seconds, seconds

    def _capture(self, candidate: Candidate, rotations: int, restore: Restore) -> Loop:
        """Capture calls on each set of operands in turn, going round until a replay takes GRAPH_S. Where sets must get
        their contents back, which is captured in a graph of its own, a replay goes round once."""
        once = self._capture_loop(candidate, rotations, rotations)
        if restore is not None:
            back = self._capture_loop(restore, rotations, rotations)
            return replace(once, restore=back.graph, restore_s=back.calls * back.call_s)
        rounds = round(GRAPH_S / (once.call_s * rotations))
        return once if rounds < 2 else self._capture_loop(candidate, rotations, rounds * rotations)

    def _capture_loop(self, candidate: Candidate, rotations: int, calls: int) -> Loop:
        candidate(0)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(calls):
                candidate(index % rotations)
        return Loop(graph, calls, self._time(graph) / calls)

    def _time(self, graph: torch.cuda.CUDAGraph) -> float:
        """Replay a graph once; seconds."""
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) * 1e-3


@dataclass(frozen=True)
class Loop:
    """A captured graph of calls, and perhaps one that gives the sets of operands their contents back."""

    graph: torch.cuda.CUDAGraph
    calls: int
    call_s: float  # of one call, roughly
    restore: torch.cuda.CUDAGraph | None = None
    restore_s: float = 0.0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class CpuClock:
    """`time.perf_counter` around calls."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = _flushing(min(FLUSH_FACTOR * cache_bytes(device), CPU_FLUSH_LIMIT))

    def flush(self) -> None:
        self.buffer.add_(1)

    def cold(self, candidates: Sequence[Candidate], order: np.ndarray, hooks: Hooks) -> np.ndarray:
        times = np.empty(order.shape)
        for row, sequence in zip(times, order, strict=True):
            hooks.before_round()
            for candidate in sequence:
                hooks.before_call(candidate, 0)
                self.flush()
                begin = time.perf_counter()
                candidates[candidate](0)
                row[candidate] = time.perf_counter() - begin
                hooks.after_call(candidate, 0)
            hooks.after_round()
        return times

    def empty(self, rounds: int) -> float:
        return float(np.median(self.cold([lambda i: None], np.zeros((rounds, 1), dtype=int), Hooks())))

    def steady(
        self, candidate: Candidate, rotations: int, seconds: float, during: Callable[[], None], restore: Restore = None
    ) -> np.ndarray:
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < 4 or time.perf_counter() < end:
            if restore is not None:
                restore(len(times) % rotations)
            begin = time.perf_counter()
            candidate(len(times) % rotations)
            times.append(time.perf_counter() - begin)
        during()
        return np.array(times[len(times) // 2 :])

    def again(self, candidate: Candidate, rotations: int, restore: Restore = None) -> tuple[float, float]:
        taken = used = 0.0
        for index in range(rotations):
            if restore is not None:
                restore(index)
            begun, begin = time.process_time(), time.perf_counter()
            candidate(index)
            taken += time.perf_counter() - begin
            used += time.process_time() - begun
        return taken / rotations, used / rotations


@cache
def _flushing(size: int) -> torch.Tensor:
    """The memory that a flush goes through; one for all benches of a process, because to get it takes longer than a flush."""
    return torch.ones(size // 4, dtype=torch.int32)


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock(device)
