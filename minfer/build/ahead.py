"""Builds many kernels at once, each in a process of its own, into the cache."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from minfer.build import cache, forks
from minfer.build.cache import Built
from minfer.ops import Kernel
from minfer.process import orphans


@dataclass(frozen=True)
class Job:
    """The library to build from a kernel's file for an architecture. `arch` is empty for the CPU."""

    kernel: Kernel
    arch: str

    @property
    def name(self) -> str:
        return f"{self.kernel.op}/{self.kernel.source.stem} {self.arch or 'cpu'}"


@dataclass(frozen=True)
class Outcome:
    """The result of a job. If it failed, `built` is a str that says why. `seconds` is 0 if the library was in the cache."""

    job: Job
    built: Built | str
    seconds: float

    @property
    def bytes(self) -> int:
        """The size of the library's folder on the disk."""
        if isinstance(self.built, str):
            return 0
        return sum(path.stat().st_size for path in Path(self.built.library).parent.iterdir() if path.is_file())


def jobs(kernels: Iterable[Kernel], archs: Iterable[str]) -> list[Job]:
    """A job for each architecture and file: kernels of one file are in one library. Those that cannot be built are left out."""
    found = dict[tuple[Path, str], Job]()
    for kernel in kernels:
        for arch in archs:
            fits = kernel.backend == "cuda" and kernel.builds_for(arch) if arch else kernel.backend == "cpp"
            if fits:
                found.setdefault((kernel.source, arch), Job(kernel, arch))
    return list(found.values())


def build_all(wanted: Iterable[Job], workers: int, timeout_s: float) -> Iterator[Outcome]:
    """Build, and yield each outcome when it is known. If the caller stops early, the compilers are killed."""
    with ThreadPoolExecutor(workers) as pool:
        running: list[Future[Outcome]] = [pool.submit(_build, job, timeout_s) for job in wanted]
        try:
            for done in as_completed(running):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for pid in list(orphans.running):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            raise


def _build(job: Job, timeout_s: float) -> Outcome:
    start = time.perf_counter()
    if found := cache.find(job.kernel, job.arch):
        return Outcome(job, found, 0.0)
    built = forks.build_apart(job.kernel.op, job.kernel.name, job.arch, timeout_s)
    return Outcome(job, built, time.perf_counter() - start)
