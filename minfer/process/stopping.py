"""Ending a shard in order: at once (SIGTERM, SIGINT), or soon (SIGUSR2), after the case that it is at."""

from __future__ import annotations

import signal
import threading

AGAIN = 75  # exit status of a shard that stopped soon, got something done, and wants another job (EX_TEMPFAIL)
STOPPED = 130


class Stopping:
    """Signal handlers of a shard's process. What they interrupt sees a KeyboardInterrupt."""

    def __init__(self) -> None:
        self.soon = False  # asked to stop after the current case
        self.progressed = False  # whether this process has finished a case

    def install(self, grace_s: float) -> None:
        """Handle the signals from now on; `grace_s` is how many seconds SIGUSR2 leaves."""
        self._grace_s = grace_s
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            if signal.getsignal(number) != signal.SIG_IGN:  # a local job's launcher gets Ctrl-C, and ends it in order
                signal.signal(number, self._now)
        # A thread of a library that was loaded earlier may take the signal; else it waits, blocked (jobs/node.py).
        signal.signal(signal.SIGUSR2, lambda *_: self._soon())
        threading.Thread(target=self._await, daemon=True).start()

    def _await(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        while True:
            signal.sigwait({signal.SIGUSR2})
            self._soon()

    def _soon(self) -> None:
        if not self.soon:  # SLURM may send it twice
            self.soon = True
            signal.setitimer(signal.ITIMER_REAL, max(0.7 * self._grace_s, 0.1))  # then the case is abandoned

    def _now(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)  # once is enough, and cleaning up is not to be interrupted
        raise KeyboardInterrupt
