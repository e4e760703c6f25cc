"""What a process prints: it comes through a pipe, so that a process in a sandbox cannot open its log, that no kernel can fill a
disk, and that a full disk ends no kernel."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import BinaryIO

MOST_PRINTED = 16 << 20  # bytes that go to the log
NO_MORE = b"\n(it printed more, which was dropped)\n"
TAIL = 4096  # bytes, in which the last line is looked for
ENDED_S = 1.0  # that the end of the pipe may take once its process was killed


class Output(threading.Thread):
    """Appends to a log what is written to `fd`, until the last process that has it ends. Whatever becomes of the log, all that
    is written to `fd` is read."""

    def __init__(self, log: Path) -> None:
        super().__init__(daemon=True)
        self.log, self.end = log, b""
        self.failed: OSError | None = None  # why the log could not be written
        self._printed, self._allowed = 0, MOST_PRINTED  # bytes; each is set by one thread only
        self._readable, self.fd = os.pipe()
        self.start()

    def run(self) -> None:
        with open(self._readable, "rb", buffering=0) as pipe, open(self.log, "ab", buffering=0) as file:
            while chunk := pipe.read(1 << 16):
                self.end = (self.end + chunk)[-TAIL:]
                left = max(0, self._allowed - self._printed)
                self._printed += len(chunk)
                try:
                    _write(file, chunk[:left])
                    if left > 0 and self.too_much:
                        _write(file, NO_MORE)
                except OSError as error:
                    self.failed = error

    @property
    def too_much(self) -> bool:
        """Whether it has printed more than goes to the log."""
        return self._printed > self._allowed

    def allow(self) -> None:
        """Let as much as MOST_PRINTED go to the log from now on."""
        self._allowed = self._printed + MOST_PRINTED

    def tail(self) -> bytes:
        """The end of what the process has printed, once it is dead."""
        self.join(ENDED_S)
        return self.end


def _write(file: BinaryIO, text: bytes) -> None:
    """Write all of it. A nearly full disk writes a part; only the next write raises the error."""
    while text:
        text = text[file.write(text) :]


def tail_of(log: Path) -> bytes:
    """The end of a log."""
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        return file.read()
