"""The progress of a shard's process: one line of JSON for each event, in the run's folder."""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

from minfer.plan.shard import Shard

ROOM = 16 << 10  # bytes; thirty events or more


class Events:
    """Writes events. Call it with the event and its data: `tell(event="case", case=key)`."""

    def __init__(self, shard: Shard) -> None:
        path = Path(shard.folder) / "progress" / f"{shard.name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.skew_s = 0.0  # how far the clock of the run's file system, which all nodes share, is ahead of this node's
        self._file = open(path, "a", buffering=1)  # noqa: SIM115

    def __call__(self, **event: Any) -> None:
        try:
            self._file.write(json.dumps({"time": time.time() + self.skew_s} | event) + "\n")
            self._keep_room()
        except OSError:
            pass  # on a full disk progress may be lost; `_keep_room` has reserved space for the reason of the failure

    def _keep_room(self) -> None:
        """Have the disk keep ROOM bytes after the file's end, if it can (fallocate with FALLOC_FL_KEEP_SIZE), so that the
        reason of a failure can be written when it is full."""
        end = os.fstat(self._file.fileno()).st_size
        ctypes.CDLL(None).fallocate(self._file.fileno(), 1, ctypes.c_long(end), ctypes.c_long(ROOM))
