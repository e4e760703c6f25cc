"""Runs a module as `python -m` would, in a copy of a process that has PyTorch already."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time

from minfer.process import fork_server


def run(module: str, *words: str, timeout: float) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        fds = [out.fileno(), err.fileno()]
        process = fork_server.start(__name__, [*map(str, fds), module, *words], fds, err.fileno(), starts_others=True)
        deadline = time.monotonic() + timeout
        while (status := process.poll()) is None:
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise subprocess.TimeoutExpired([module, *words], timeout)
            time.sleep(0.01)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess([module, *words], status, out.read(), err.read())


def main() -> None:
    out, err, module, *words = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    for number, fd in enumerate((int(out), int(err)), 1):
        os.dup2(fd, number)
        os.close(fd)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
