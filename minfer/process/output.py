"""What a process in a sandbox prints: it comes through a pipe, because the process must not be able to open its log."""

from __future__ import annotations

import os
import threading
from pathlib import Path

MOST_PRINTED = 16 << 20  # bytes that go to the log
NO_MORE = b"\n(it printed more, which was dropped)\n"
TAIL = 4096  # bytes, in which the last line is looked for
ENDED_S = 1.0  # that the end of the pipe may take once its process was killed


class Output(threading.Thread):
    """Appends to a log what is written to `fd`, until the last process that has it ends."""

    def __init__(self, log: Path) -> None:
        super().__init__(daemon=True)
        self.log, self.end = log, b""
        self._readable, self.fd = os.pipe()
        self.start()

    def run(self) -> None:
        left = MOST_PRINTED
        with open(self._readable, "rb", buffering=0) as pipe, open(self.log, "ab", buffering=0) as file:
            while chunk := pipe.read(1 << 16):
                self.end = (self.end + chunk)[-TAIL:]
                file.write(chunk[:left])
                if left > 0 >= left - len(chunk):
                    file.write(NO_MORE)
                left = max(0, left - len(chunk))

    def tail(self) -> bytes:
        """The end of what the process has printed, once it is dead."""
        self.join(ENDED_S)
        return self.end


def tail_of(log: Path) -> bytes:
    """The end of a log."""
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        return file.read()
