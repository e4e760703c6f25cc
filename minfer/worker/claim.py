"""Claims: one process runs a shard, and one process at a time measures on a GPU."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from minfer.plan.shard import Shard


class Superseded(Exception):
    """Another process runs this shard: SLURM believed that this one was lost, and started its job again."""


class Claim:
    """Marks that this process runs a shard from now on. A case has one row, so an earlier process must stop writing."""

    def __init__(self, shard: Shard) -> None:
        self.path = Path(shard.folder) / "progress" / f"{shard.name}.process"
        self.process = f"process {os.getpid()} on {socket.gethostname()} since {time.time()}"
        self.skew_s = 0.0  # how far the clock of the run's file system, which all nodes share, is ahead of this node's
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):  # on a full disk no claim can be written, and rows matter more
            partial.write_text(self.process)
            self.skew_s = partial.stat().st_mtime - time.time()
            os.replace(partial, self.path)

    def check(self) -> None:
        """Raise Superseded when another process has claimed the shard since."""
        try:
            holder = self.path.read_text()
        except OSError:
            return
        if holder != self.process:
            raise Superseded(f"{holder} runs this shard now")


@contextlib.contextmanager
def lock_gpu(gpu: str | None, wait: Callable[[], object]) -> Iterator[None]:
    """Hold a lock on the GPU with this UUID, so that no other minfer process measures on it. Calls `wait` once if it has to
    wait for the lock."""
    if gpu is None:
        yield
        return
    path = f"/tmp/minfer-{gpu}.lock"  # not TMPDIR, which each job has for itself; other users may only read it
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        file = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
