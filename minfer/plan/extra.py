"""Loads the Python files of `extra=`. They are the user's own and may do anything when they are imported."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from minfer import ops
from minfer.plan.config import UserError
from minfer.process.text import make_printable

IMPORT_S = 60.0  # for the import of one file
LATE = " is still being imported after {:g} s"


def load(path: str, seconds: float = IMPORT_S) -> None:
    """Import a file that registers ops or kernels. A forked copy of this process imports it first, because the file may end its
    process or never return. Raises UserError, one sentence: with the line at which the file fails, or that it registers
    nothing. If this process has imported the file before, nothing happens."""
    if ops.is_loaded(Path(path)):
        return
    before = _list_registered()
    if why := _try_in_copy(path, seconds):
        raise UserError(f"extra={path}{why}; correct the file")
    ops.load_file(Path(path))
    if _list_registered() == before:
        raise UserError(f"extra={path} registers no op and no kernel; add one as docs/adding.md says, or leave it out")


def _list_registered() -> set[tuple[str, ...]]:
    """All ops, and all kernels with their ops."""
    found = [ops.get(name) for name in ops.names()]
    return {(op.name,) for op in found} | {(op.name, kernel) for op in found for kernel in op.kernels}


def _try_in_copy(path: str, seconds: float) -> str:
    """What goes wrong when a forked process imports the file, as the end of a sentence; "" if nothing does."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about a fork with threads: the copy needs none
        pid = os.fork()
    if pid == 0:
        os.setsid()
        _try(path, seconds, writable)
    os.close(writable)
    with os.fdopen(readable, "rb") as answer:
        deadline = time.monotonic() + seconds + 1.0
        status = (0, 0)
        try:
            while status == (0, 0) and time.monotonic() < deadline:
                select.select([], [], [], 0.005)  # time.sleep fails under libfaketime
                status = os.waitpid(pid, os.WNOHANG)
        finally:
            if status == (0, 0):  # the copy does not react to SIGALRM, or this process is told to stop
                os.kill(pid, signal.SIGKILL)
                with suppress(ProcessLookupError):  # the copy has no process group of its own yet
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if status == (0, 0):
            return LATE.format(seconds)
        os.set_blocking(readable, False)
        said = make_printable((answer.read(1 << 16) or b"").decode(errors="replace"))
    if os.WIFSIGNALED(status[1]):
        return f" ends its process by {signal.Signals(os.WTERMSIG(status[1])).name} when it is imported"
    if not said:  # the file called os._exit
        return f" ends its process with exit status {os.WEXITSTATUS(status[1])} when it is imported"
    return "" if said == "ok" else said if said.startswith(",") else f" {said}"


def _try(path: str, seconds: float, writable: int) -> NoReturn:
    """What the copy does: import the file, write to the pipe how that went, and exit."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    faulthandler.disable()  # it may have duplicated stderr
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)  # repeatedly: the file may catch the first TimeoutError
    begin = time.monotonic()
    try:
        ops.load_file(Path(path))
        said = "ok"
    except BaseException as error:  # the file may raise anything
        signal.setitimer(signal.ITIMER_REAL, 0)
        at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        said = f", line {at[-1]}," if at else ""
        if isinstance(error, SystemExit):
            said += f" ends its process by sys.exit({error.code!r}) when it is imported"
        elif isinstance(error, TimeoutError) and time.monotonic() - begin >= seconds:
            said += LATE.format(seconds)
        else:
            said += f" cannot be imported: {type(error).__name__}: {error}".rstrip(": ")
    os.write(writable, make_printable(said).encode())
    os._exit(0)
