"""The progress of a shard's process: one line of JSON for each event, in the run's folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from minfer.plan.shard import Shard


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
        except OSError:
            pass  # progress may be lost; the code that writes rows reports a full disk
