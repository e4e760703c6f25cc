"""Stops a process with everything that it started, sees that it stands still, and lets it go on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from minfer.process.cgroup import Cgroup
from minfer.process.death import Died
from minfer.process.orphans import orphans
from minfer.process.threads import children, cpu_at_rest, cpu_s, family, states

STOPPING_S = 10.0  # a thread that waits for a disk cannot be stopped before it is served
COULD_NOT_STOP = f"could not be stopped within {STOPPING_S:g} s"
MOVED = "ran while it was stopped"
MOST_MOVED_S = 2e-4  # CPU time
POLL_S = 2e-5  # between two looks; asleep, because a thread needs a CPU to stop, and one that yields keeps it for 3 ms
LOOKS = 20  # at the table of processes: one look may miss a process that forks and ends


class Freezer:
    """Stops one process, the first of its session: by a cgroup of its own, if it may have one and one can be made, else by
    signals."""

    def __init__(self, pid: int, cgroup: bool) -> None:
        self.pid = pid
        self.cgroup: Cgroup | None = None
        self._stood: float | None = None  # CPU time that it had used when it was stopped; None while it runs
        if cgroup:
            with contextlib.suppress(OSError):
                self.cgroup = Cgroup(pid)

    def freeze(self) -> None:
        """Stop it and everything that it started, in whatever session. Raises Died."""
        if self.cgroup is not None:
            if not self.cgroup.freeze():
                raise Died("timeout", COULD_NOT_STOP)
            return
        halt(self.pid)
        self._stood = cpu_at_rest(self.pid)
        try:
            stop(lambda: {self.pid} | orphans())
        finally:
            self.check_stands_still()  # else it is why there was no end of stopping

    def thaw(self) -> float:
        """Let it go on; where it has no cgroup, only what is in its session. Returns the time (`time.perf_counter`) before
        which it stood still. Raises Died if it ran while it was stopped."""
        self.check_stands_still()
        self._stood = None
        begin = time.perf_counter()
        if self.cgroup is not None:
            self.cgroup.thaw()
        else:
            signal_session(self.pid, signal.SIGCONT)
        return begin

    def check_stands_still(self) -> None:
        """Raises Died if it ran since it was stopped by a signal, which a timer of its own may have undone (SIGCONT). If
        another program only wakes it, as `scontrol resume` does, it runs for some microseconds. A process
        that a cgroup froze cannot wake."""
        if self._stood is None:
            return
        ran = cpu_s(self.pid) - self._stood
        if ran > MOST_MOVED_S or "R" in states(self.pid):
            raise Died("dishonest", MOVED)

    def strays(self) -> set[int]:
        """The processes that it started, or that were left behind to this one, and that have not been waited for. Reliable
        once all of it is stopped."""
        if self.cgroup is not None:
            return self.cgroup.processes() - {self.pid}
        looks = (children(self.pid) | orphans() for _ in range(LOOKS))
        return set().union(*looks)

    def kill(self) -> None:
        """Kill everything that it started, in whatever session; without a cgroup only what is in its session."""
        signal_session(self.pid, signal.SIGKILL)
        if self.cgroup:
            self.cgroup.kill()
            self.cgroup = None


def signal_session(pid: int, number: int) -> None:
    """Send a signal to a process that began a session, and to everything that it started in it."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def halt(pid: int) -> None:
    """Stop all threads of a child of this process, and return at once when they stand still or it has ended. Raises Died."""
    deadline = time.monotonic() + STOPPING_S
    how = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
    while time.monotonic() < deadline:
        os.kill(pid, signal.SIGSTOP)  # again: a SIGCONT that comes before it has stopped undoes this
        if os.waitid(os.P_PID, pid, how) is not None:
            return
        time.sleep(POLL_S)
    raise Died("timeout", COULD_NOT_STOP)


def stop(roots: Callable[[], set[int]]) -> None:
    """Stop processes and everything that they started. What is not stopped yet may start more, so it looks again. Raises
    Died."""
    deadline = time.monotonic() + STOPPING_S
    while running := {pid for pid in family(roots()) if set(states(pid)) - set("TtZX")}:
        if time.monotonic() > deadline:
            raise Died("timeout", COULD_NOT_STOP)
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        os.sched_yield()
