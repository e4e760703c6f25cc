"""The children and threads of a process, seen from outside: their CPU time, their waits for a CPU, and where they may run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

# Linux says that a process has stopped just before its last thread leaves the CPU, and adds up what the thread has used, up to
# a tick of the scheduler (4 ms), when it leaves. So the CPU time at rest is one that two looks agree on, this far apart.
SETTLING_S, MOST_LOOKS = 5e-4, 20


def children(pid: int) -> set[int]:
    """The processes that a process started, or adopted, and that still run."""
    return {child for child in all_children(pid) if runs(child)}


def all_children(pid: int) -> set[int]:
    """The processes that a process started, or adopted; those that have ended and that nobody has waited for, too."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {int(child) for child in path.read_text().split()}
    return found


def runs(pid: int) -> bool:
    """Whether a process has a thread, and not only its exit status. The first thread may have ended before others, and
    then the process looks as if it had."""
    return any(state not in "ZX" for state in states(pid))


def states(pid: int) -> list[str]:
    """Of each thread: running, stopped, ended."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().rpartition(b")")[2].split()[0].decode())
    return found


def family(roots: set[int]) -> set[int]:
    """Processes, what they started, what that started, and so on."""
    found: set[int] = set()
    new = roots
    while new:
        found |= new
        new = {child for pid in new for child in children(pid)} - found
    return found


def cpu_s(pid: int) -> float:
    """Seconds of CPU time that all threads of a process have used; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid makes it
    return 0.0


def cpu_at_rest(pid: int) -> float:
    """The CPU time that a process has used, which has just been stopped."""
    used = cpu_s(pid)
    for _ in range(MOST_LOOKS):
        time.sleep(SETTLING_S)
        before, used = used, cpu_s(pid)
        if used == before:
            break
    return used


def run_delays(pid: int) -> dict[str, int]:
    """How long each thread of a process was ready to run and had no CPU, so far, in nanoseconds; empty where the system does
    not say. A thread that sleeps does not wait for a CPU."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):
            found[path.parent.name] = int(path.read_text().split()[1])
    return found


def delay_s(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Seconds for which the threads that were there before have waited for a CPU between two `run_delays`, all together."""
    return sum(max(0, ns - before.get(thread, ns)) for thread, ns in after.items()) * 1e-9


def my_run_delay_s() -> float:
    """Seconds for which this thread was ready to run and had no CPU, so far; 0 where the system does not say."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    return 0.0


@contextlib.contextmanager
def waking_apart(pid: int) -> Iterator[Callable[[], None]]:
    """Have the threads of a stopped process wake apart: the first one on the CPU where it ran last, with this thread, and the
    others on other CPUs. Yields a function that lets them run wherever they could before; call it when the first one has work.

    All threads of a stopped process wake at once, and Linux may put two of them on one CPU. Then each barrier of OpenMP takes a
    millisecond, because one thread spins there while the other one waits for the CPU: on two idle processors, a block of 0.7 ms
    took 13 ms. OpenMP's threads spin for milliseconds after the answer, too. If this thread shared a CPU with one of them, it
    would read the answer late."""
    masks: dict[int, set[int]] = {}
    here, mine = -1, os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # it has ended, or its first thread has
        here = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[36])
        tasks = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
        masks = {task: os.sched_getaffinity(task) for task in tasks}
    apart = len(masks) > 1 and here in masks[pid] & mine and len(masks[pid]) > 1
    for task, mask in masks.items() if apart else ():
        _move(task, {here} if task == pid else mask - {here} or mask)
    if apart:
        _move(0, {here})

    def release() -> None:
        for task, mask in masks.items() if apart else ():
            _move(task, mask)

    try:
        yield release
    finally:
        if apart:
            _move(0, mine)


def _move(thread: int, cpus: set[int]) -> None:
    with contextlib.suppress(OSError):  # it has ended
        os.sched_setaffinity(thread, cpus)
