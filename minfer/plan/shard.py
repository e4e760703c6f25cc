"""A shard: the cases that one job runs, as the launcher writes them down."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minfer import ops
from minfer.bench.timing import Timing
from minfer.ops import Case, Kernel


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
    drawn: int | None = None  # the seed that its problems were drawn with
    resume: bool = False
    untrusted: bool = False
    beside: str = ""  # a kernel that the judge times in the same rounds as each of the others
    sandbox: str = ""  # the level for what is untrusted, of minfer.sandbox; empty for the strongest that the node has
    profilers: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> its options
    extra: list[str] = field(default_factory=list)
    commit: str | None = None
    sources: dict[str, str] = field(default_factory=dict)  # file that is not this project's -> its hash, at submission
    node: str | None = None  # the only one to run it, by SLURM's name
    resources: dict[str, Any] = field(
        default_factory=dict
    )  # keys of `cluster` that its sweep states, with their values
    redo: dict[str, float] = field(default_factory=dict)  # case -> when its row was finished that is to be replaced

    def check_sources(self) -> None:
        """A run measures the sources that it was submitted with. The project's are copied (jobs/run.py); others stay
        where they are, and may have changed: then this raises Unfit."""
        for name, digest in self.sources.items():
            if not Path(name).is_file() or _hash(Path(name)) != digest:
                raise Unfit(f"{name} has changed since the run was submitted; start a new run")

    def save(self) -> Path:
        """Write the shard's file, which is there whole or not at all, and return its path."""
        path = Path(self.folder) / "shards" / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = asdict(self) | {"cases": [case.to_dict() for case in self.cases]}
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(text, indent=1))
        os.replace(partial, path)
        return path

    @staticmethod
    def load(path: Path) -> Shard:
        text = json.loads(path.read_text())
        text["cases"] = [Case(**case) for case in text["cases"]]
        text["timing"] = Timing(**text["timing"])
        return Shard(**text)


class Unfit(Exception):
    """A shard cannot be run as it is, whatever its kernels do; the message says why and what to do."""


def hash_outside(extra: list[str], cases: list[Case]) -> dict[str, str]:
    """The hashes of the files outside of this project that cases depend on, for `Shard.sources`."""
    kernels = {(case.op, case.kernel): ops.get(case.op).kernels[case.kernel] for case in cases}.values()
    files = {path for kernel in kernels for path in _sources(kernel) if not path.is_relative_to(ops.PACKAGE)}
    return {str(path): _hash(path) for path in sorted(files | set(map(Path, extra)))}


def _sources(kernel: Kernel) -> list[Path]:
    """A kernel's sources; empty if one of them cannot be read, which its rows will report."""
    try:
        return kernel.sources()
    except ops.SourceError:
        return []


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
