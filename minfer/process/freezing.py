"""Stops a process and everything that it started, checks that it does not run, and continues it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from minfer.process import pids
from minfer.process.cgroup import Cgroup
from minfer.process.death import Died
from minfer.process.orphans import orphans
from minfer.process.threads import children, cpu_at_rest, cpu_s, family, runs, states

STOPPING_S = 10.0  # a thread that waits for a disk stops only after the disk has answered
COULD_NOT_STOP = f"could not be stopped within {STOPPING_S:g} s"
MOVED = "ran while it was stopped"
LEFT = "left the cgroup by which it is stopped"
MOST_MOVED_S = 2e-4  # CPU time
POLL_S = 2e-5  # of sleep between two looks: a thread needs a CPU to stop, and one that only yields keeps it for 3 ms
LOOKS = 20  # at the table of processes: one look may miss a process that forks and ends


class Freezer:
    """Stops one process, the first of its session: with a cgroup of its own if `cgroup` is set and one can be made, else
    with signals."""

    def __init__(self, pid: int, cgroup: bool) -> None:
        self.pid = pid
        self.cgroup: Cgroup | None = None
        self._stood: float | None = None  # CPU time that it had used when it was stopped; None while it runs
        self.pids: Path | None = None  # the cgroup that limits its threads, if that is not `cgroup`
        if cgroup:
            with contextlib.suppress(OSError):
                self.cgroup = Cgroup(pid)
            self.pids = pids.limit(pid, self.cgroup.folder if self.cgroup else None)

    def freeze(self) -> None:
        """Stop it and everything that it started, in any session. Raises Died."""
        if self.cgroup is not None:
            if not self.cgroup.freeze():
                raise Died("timeout", COULD_NOT_STOP)
            if self.pid not in self.cgroup.processes() and runs(self.pid):
                raise Died("dishonest", LEFT)
            return
        halt(self.pid)
        self._stood = cpu_at_rest(self.pid)
        try:
            stop(lambda: {self.pid} | orphans())
        finally:
            self.check_stands_still()  # if it ran meanwhile, that is why stopping timed out

    def thaw(self) -> float:
        """Continue it; without a cgroup this continues only the processes of its session. Returns the time
        (`time.perf_counter`) before which it did not run. Raises Died if it ran while it was stopped."""
        self.check_stands_still()
        self._stood = None
        begin = time.perf_counter()
        if self.cgroup is not None:
            self.cgroup.thaw()
        else:
            signal_session(self.pid, signal.SIGCONT)
        return begin

    def check_stands_still(self) -> None:
        """Raises Died if it has run since a signal stopped it: a timer of its own may have sent it a SIGCONT. Some
        microseconds are allowed, because another program, such as `scontrol resume`, may have woken it. A process that a
        cgroup has frozen cannot wake."""
        if self._stood is None:
            return
        ran = cpu_s(self.pid) - self._stood
        if ran > MOST_MOVED_S or "R" in states(self.pid):
            raise Died("dishonest", MOVED)

    def strays(self) -> set[int]:
        """The processes that it started and this process's orphans that have not been waited for. Reliable once everything is
        stopped."""
        if self.cgroup is not None:  # a process that root owns may have left it
            adopted = {pid for _ in range(LOOKS) for pid in orphans() if runs(pid)}
            return (self.cgroup.processes() | family({self.pid}) | adopted) - {self.pid}
        looks = (children(self.pid) | orphans() for _ in range(LOOKS))
        return set().union(*looks)

    def kill(self) -> None:
        """Kill everything that it started, in any session; without a cgroup only the processes of its session."""
        signal_session(self.pid, signal.SIGKILL)
        if self.cgroup:
            self.cgroup.kill()
            self.cgroup = None
        if self.pids:
            pids.remove(self.pids)


def signal_session(pid: int, number: int) -> None:
    """Send a signal to a process that began a session, and to everything that it started in it."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def halt(pid: int) -> None:
    """Stop all threads of a child of this process; return as soon as they have stopped or it has ended. Raises Died."""
    deadline = time.monotonic() + STOPPING_S
    how = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
    while time.monotonic() < deadline:
        os.kill(pid, signal.SIGSTOP)  # repeated, because a SIGCONT before it has stopped cancels it
        if os.waitid(os.P_PID, pid, how) is not None:
            return
        time.sleep(POLL_S)
    raise Died("timeout", COULD_NOT_STOP)


def stop(roots: Callable[[], set[int]]) -> None:
    """Stop processes and everything that they started. Repeats, because a process that still runs may start more. Raises
    Died."""
    deadline = time.monotonic() + STOPPING_S
    while running := {pid for pid in family(roots()) if set(states(pid)) - set("TtZX")}:
        if time.monotonic() > deadline:
            raise Died("timeout", COULD_NOT_STOP)
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        os.sched_yield()
