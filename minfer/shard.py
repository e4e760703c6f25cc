"""A shard: the cases that one job runs, as the launcher writes them down, and which process it is that runs them now."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minfer import ops
from minfer.bench.timing import Timing
from minfer.ops import Case


@dataclass
class Shard:
    """What one job runs; written by the launcher as JSON."""

    name: str
    run: str
    folder: str  # of the run: its shards, logs and progress
    results: str
    device: str  # "cuda" or "cpu"
    cases: list[Case]
    timing: Timing
    case_timeout_s: float
    build_timeout_s: float
    resume: bool = False
    untrusted: bool = False
    profilers: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> its options
    extra: list[str] = field(default_factory=list)
    commit: str | None = None
    sources: dict[str, str] = field(default_factory=dict)  # file that is not this project's -> its hash, at submission

    def check_sources(self) -> None:
        """A run measures the sources that it was submitted with. The project's are copied (jobs/record.py); others stay
        where they are, and may have changed: then this raises Unfit."""
        for name, digest in self.sources.items():
            if not Path(name).is_file() or _digest(Path(name)) != digest:
                raise Unfit(f"{name} has changed since the run was submitted; start a new run")

    def save(self) -> Path:
        path = Path(self.folder) / "shards" / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = asdict(self) | {"cases": [case.to_dict() for case in self.cases]}
        path.write_text(json.dumps(text, indent=1))
        return path

    @staticmethod
    def load(path: Path) -> Shard:
        text = json.loads(path.read_text())
        text["cases"] = [Case(**case) for case in text["cases"]]
        text["timing"] = Timing(**text["timing"])
        return Shard(**text)


class Unfit(Exception):
    """A shard cannot be run as it is, whatever its kernels do; the message says why and what to do."""


class Superseded(Exception):
    """Another process runs this shard: SLURM lost sight of this one and has started its job again."""


class Claim:
    """That this process runs a shard, from now on. A case has one row, so whoever ran it before must write no more."""

    def __init__(self, shard: Shard) -> None:
        self.path = Path(shard.folder) / "progress" / f"{shard.name}.process"
        self.process = f"process {os.getpid()} on {socket.gethostname()} since {time.time()}"
        self.skew_s = 0.0  # how far the clock of the run's file system, which all nodes share, is ahead of this node's
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):  # on a full disk nobody claims anything, and rows are what matters
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


def outside(extra: list[str], cases: list[Case]) -> dict[str, str]:
    """The hashes of the files outside of this project that cases depend on, for `Shard.sources`."""
    kernels = {(case.op, case.kernel): ops.get(case.op).kernels[case.kernel] for case in cases}.values()
    files = {path for kernel in kernels for path in kernel.sources() if not path.is_relative_to(ops.PACKAGE)}
    return {str(path): _digest(path) for path in sorted(files | set(map(Path, extra)))}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@contextlib.contextmanager
def alone(gpu: str | None, wait: Callable[[], object]) -> Iterator[None]:
    """Nothing else of ours is timed on a GPU, which is known by its UUID, while this lasts. Calls `wait` before it waits."""
    if gpu is None:
        yield
        return
    path = f"/tmp/minfer-{gpu}.lock"  # not TMPDIR, which is a job's own; other users may only read it
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
