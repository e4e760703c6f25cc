"""The background process, in which variants are compiled and tried, and its parent's side of it.

A compiler that crashes, machine code that crashes, and a compile that never ends, are lost with that process, and no more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from minfer.process.death import Died
from minfer.process.freezing import signal_session
from minfer.process.remote import Process, serve
from minfer.specialise.buckets import Key, Span
from minfer.specialise.recipe import Recipe
from minfer.specialise.recipes import find
from minfer.specialise.trial import Outcome, tried


class Background:
    """Starts the process when it is first needed, and again after it died."""

    def __init__(self, recipe: Recipe, seconds: float) -> None:
        self.recipe, self.seconds = recipe, seconds
        self._process: Process | None = None
        self._log: Path | None = None

    @property
    def running(self) -> bool:
        return self._process is not None

    def outcome(self, key: Key) -> Outcome:
        """Have a variant compiled and tried; waits for it."""
        try:
            if self._process is None:
                handle, name = tempfile.mkstemp(prefix="minfer-specialise-", suffix=".log")
                os.close(handle)
                self._log = Path(name)
                self._process = Process("minfer.specialise.background", self._log, start=_started)
            assert self.recipe.file is not None
            about = {
                "name": self.recipe.name,
                "file": str(self.recipe.file),
                "key": key,
                "threads": torch.get_num_threads(),
            }
            return Outcome(**self._process.ask(self.seconds, **about))
        except Died as error:
            self.close()
            return Outcome("failed", str(error))
        except OSError as error:
            self.close()
            return Outcome("full" if error.errno in (28, 122) else "failed", str(error))

    def close(self) -> None:
        """End the process, and whatever it started."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
        self._remove_log()

    def abandon(self) -> None:
        """Kill it without waiting for its exit status; from another thread, or with the process that is asking for it."""
        if (process := self._process) is not None:
            signal_session(process.process.pid, signal.SIGKILL)
            self._remove_log()

    def _remove_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.unlink(missing_ok=True)

    def forget(self) -> None:
        """After a fork: the process is the parent's."""
        self._process = self._log = None


def _started(module: str, arguments: Sequence[str], fds: Sequence[int], log: int) -> subprocess.Popen[bytes]:
    """A module in a new interpreter, which a fork of this process could not be: it may have threads and a CUDA context."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], pass_fds=tuple(fds), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        start_new_session=True, env={**os.environ, "PYTHONPATH": paths, "MAX_JOBS": "1"},  # one compiler beside what is served
    )  # fmt: skip


def answer(request: dict[str, Any], say: Callable[..., None]) -> dict[str, Any]:
    torch.set_num_threads(request["threads"])  # the trial must see what the caller will
    recipe = find(request["name"], Path(request["file"]))
    return vars(tried(recipe, tuple(Span(*span) for span in request["key"]), say))


if __name__ == "__main__":
    os.nice(10)  # who is served comes first
    serve(answer)
