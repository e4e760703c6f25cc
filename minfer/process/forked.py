"""Runs a module like `python -m`, but in a fork of the fork server, which saves the seconds that importing PyTorch takes."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings

from minfer.process import fork_server
from minfer.process.orphans import running, sweeping


class Started:
    """A running module, in a process session of its own, with a part of the interface of `subprocess.Popen`. With
    `starts_others` it gets a fork server of its own. Raises OSError if it cannot be started."""

    def __init__(self, module: str, *words: str, starts_others: bool = False) -> None:
        self._command = [module, *words]
        self._out, self._err = (tempfile.TemporaryFile("w+", errors="replace") for _ in range(2))  # noqa: SIM115
        fds = [self._out.fileno(), self._err.fileno()]
        given = [*map(str, fds), module, *words]
        with sweeping:
            try:
                self._process = fork_server.start(__name__, given, fds, fds[1], starts_others=starts_others)
            except OSError as error:
                self._err.seek(0)
                raise OSError(self._err.read().rstrip().rpartition("\n")[2] or str(error)) from error
            running.add(self._process.pid)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._process.returncode

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        if self._process.poll() is not None:
            running.discard(self.pid)
        return self.returncode

    def kill(self) -> None:
        """Kill its session and wait for it."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            running.discard(self.pid)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait until it has ended; return its standard output and its errors. After `timeout` seconds kill it and raise
        TimeoutExpired."""
        deadline = time.monotonic() + timeout
        try:
            while self.poll() is None:
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(self._command, timeout)
                time.sleep(0.01)
        finally:
            self.kill()
        printed = []
        for file in (self._out, self._err):
            with file:
                file.seek(0)
                printed.append(file.read())
        return printed[0], printed[1]


def run(module: str, *words: str, timeout: float, starts_others: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a module to its end. Raises TimeoutExpired, and OSError if it cannot be started."""
    started = Started(module, *words, starts_others=starts_others)
    _awaited.add(started)
    try:
        out, err = started.communicate(timeout)
    finally:
        _awaited.discard(started)
    assert started.returncode is not None
    return subprocess.CompletedProcess([module, *words], started.returncode, out, err)


_awaited: set[Started] = set()  # processes for which `run` waits, each in a thread


def end_all() -> None:
    """Kill the processes for which `run` waits in any thread. Each `run` returns the status of a killed process."""
    for started in list(_awaited):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


def main() -> None:
    out, err, module, *words = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    for number, fd in enumerate((int(out), int(err)), 1):
        os.dup2(fd, number)
        os.close(fd)
    sys.argv = [module, *words]
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # the module may be imported already
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
