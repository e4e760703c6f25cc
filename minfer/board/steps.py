"""What a submitter sees on standard error while a submission is judged: what is being done, and the seconds since the start.
On a terminal this is one line, which is rewritten; else a line is printed at most every `LINE_S` seconds."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

POLL_S = 0.25
LINE_S = 10.0  # between two lines where there is no terminal


class Steps:
    """As a context manager, shows the steps of a board's runs; outside of one, only remembers the newest step. A thread reads
    the events that the run's processes write (`minfer.worker.events`)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._doing, self._about = "starting", ""
        self._folder: Path | None = None
        self._names: Mapping[str, str] = {}
        self._begin, self._printed, self._ended = time.monotonic(), time.monotonic(), threading.Event()

    def say(self, doing: str, about: str = "") -> None:
        """Show what is being done. about: what this run is for, which stands before each of its steps."""
        self._doing, self._about, self._folder = doing, about, None

    def follow(self, folder: Path, names: Mapping[str, str]) -> None:
        """Show the steps of the newest run below `folder`/runs. names: what each case is called, by its key."""
        self._names, self._folder = names, folder

    def line(self) -> str:
        """What is being done, and the seconds since the submission began."""
        if self._folder:
            with contextlib.suppress(OSError):
                self._doing = _read(self._folder, self._names) or self._doing
        return f"minfer: {self._about}{self._doing} ({time.monotonic() - self._begin:.0f} s since the start)"

    def __enter__(self) -> Steps:
        self._begin = self._printed = time.monotonic()
        self._ended.clear()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _show(self) -> None:
        rewrites = self._stream.isatty()
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any longer
            while not self._ended.wait(POLL_S):
                if rewrites:
                    self._stream.write(f"\r\x1b[K{self.line()[: shutil.get_terminal_size().columns - 1]}")
                    self._stream.flush()
                elif time.monotonic() - self._printed >= LINE_S:
                    print(self.line(), file=self._stream, flush=True)
                    self._printed = time.monotonic()
            if rewrites:
                self._stream.write("\r\x1b[K")
                self._stream.flush()


def _read(folder: Path, names: Mapping[str, str]) -> str:
    """The newest step of the newest run, in words; "" if there is none yet."""
    runs = sorted(folder.glob("runs/*"))
    said = ""
    for path in sorted(runs[-1].glob("progress/*.jsonl")) if runs else ():
        for line in path.read_text("utf-8", errors="replace").split("\n")[:-1]:
            with contextlib.suppress(ValueError):
                said = _describe(json.loads(line), names, len(runs) > 1) or said
    return said


def _describe(event: Mapping[str, str], names: Mapping[str, str], is_again: bool) -> str:
    match event["event"]:
        case "start":
            return "starting"
        case "built":
            return "preparing the device"
        case "building" | "build":
            return "compiling"
        case "waiting":
            return f"waiting: {event.get('why') or 'another run uses the GPU'}"
        case "case" if name := names.get(event["case"]):
            return f"verifying and timing {name}" + (" again: it could not be judged before" if is_again else "")
    return ""
