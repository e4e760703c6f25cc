"""Compiles the kernels of a shard: several at once, each in a process of its own. Meanwhile only the cases of a first pass are
timed, whose rows are replaced later."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minfer import ops
from minfer.bench import peaks
from minfer.build import cache, forks
from minfer.build.cache import Built
from minfer.build.errors import DISK_FULL, BuildError
from minfer.ops import Case, Kernel
from minfer.plan.shard import Shard, Unfit
from minfer.process import forked
from minfer.process.death import Died
from minfer.process.remote import Process
from minfer.sandbox import Sandbox
from minfer.worker import sandboxed

LARGEST = 1 << 30  # bytes of a library from a sandbox

Key = tuple[str, str]  # an op and a kernel
Job = Future["Built | str"]


class Compiler:
    """Starts the compilers of a shard. `arch` is "" without a GPU; `tell` is called with each event."""

    def __init__(self, shard: Shard, arch: str, tell: Callable[..., None], sandbox: Sandbox | None = None) -> None:
        self.shard, self.arch, self.tell, self.sandbox = shard, arch, tell, sandbox

    def compile(self, cases: Iterable[Case]) -> dict[str, Built | str]:
        """Build what the cases need. Returns, by `op/kernel`, what was built, or a str that says why building failed. Raises
        Unfit."""
        with self.start(cases) as builds:
            return builds.wait()

    @contextlib.contextmanager
    def start(self, cases: Iterable[Case], spare: int = 0) -> Iterator[Builds]:
        """Begin to build the kernels of the cases, in their order, on all processors but `spare`. If an exception ends the
        block, the builds that are still running are abandoned."""
        named = {(case.op, case.kernel): ops.get(case.op).kernels[case.kernel] for case in cases}
        kernels = {(each.op, each.name): each for kernel in named.values() for each in needed_by(kernel, self.arch)}
        chosen = [key for key, kernel in kernels.items() if _can_be_built(kernel)]
        apart = [key for key in chosen if self.sandbox and not kernels[key].source.is_relative_to(ops.PACKAGE)]
        self.tell(event="building")
        pool = ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) - spare))
        try:
            device = None
            if self.arch and not cache.find(peaks.KERNEL, self.arch):  # if this fails, the child reports it
                device = pool.submit(self.run, "peaks", "minfer.bench.peaks", self.arch)
            jobs = {key: pool.submit(self._one, *key) for key in chosen if key not in apart}
            yield Builds(self, jobs, device, apart)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            forked.end_all()
            raise
        finally:
            pool.shutdown()

    def _apart(self, op: str, name: str) -> Built | str:
        """Compile a kernel in a sandbox. The library is read once no process is left that could change it."""
        kernel = ops.get(op).kernels[name]
        if found := sandboxed.find(kernel, self.arch):
            return Built(**asdict(found) | {"seconds": None})
        logs = Path(self.shard.folder) / "logs"
        with open(os.memfd_create("minfer-build"), "r+b") as file:
            builder = Process("minfer.worker.builder", logs / f"{self.shard.name}.log", [file.fileno()], self.sandbox)
            about = {"op": op, "kernel": name, "arch": self.arch, "extra": self.shard.extra, "to": file.fileno()}
            try:
                reply = builder.ask(self.shard.build_timeout_s, **about)
            except Died as death:
                return f"the compiler's process failed: {death}"
            finally:
                builder.kill()
            if "error" in reply:
                (logs / f"{self.shard.name}.{name}.build.log").write_text(str(reply.get("log")))
                return str(reply["error"])
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST:
                return f"its library has {size >> 20} MiB, more than {LARGEST >> 20}"
            try:
                library = os.pread(file.fileno(), size, 0)
                return sandboxed.store(kernel, self.arch, reply.get("built") or {}, library, reply.get("reads") or ())
            except BuildError as error:
                return str(error)

    def _one(self, op: str, name: str) -> Built | str:
        if found := cache.find(ops.get(op).kernels[name], self.arch):
            return Built(**asdict(found) | {"seconds": None})
        extra = [] if self.sandbox else self.shard.extra  # this project's own kernels need none
        done = self.run(name, "minfer.build", op, name, self.arch, *extra)
        if isinstance(done, str):
            return done
        return forks.read_reply(done.stdout)

    def run(self, name: str, module: str, *words: str) -> subprocess.CompletedProcess[str] | str:
        """Run one compiler. Returns its process, or a str that says why it failed. Raises Unfit if that is not the kernel's
        fault."""
        done = forks.run(module, *words, timeout_s=self.shard.build_timeout_s)
        if isinstance(done, str) or done.returncode == 0:
            return done
        return self.explain(name, done.returncode, done.stderr)

    def explain(self, name: str, status: int, err: str) -> str:
        """Why a compiler failed, by its exit status and its errors, which go into a log. Raises Unfit if that is not the
        kernel's fault."""
        with open(Path(self.shard.folder) / "logs" / f"{self.shard.name}.{name}.build.log", "w") as log:
            log.write(err)
        if full := DISK_FULL.search(err):
            where = os.environ.get("TORCH_EXTENSIONS_DIR", "the cache of compiled kernels")
            raise Unfit(f"cannot compile {name} in {where}: {full[0]}; free it or set cluster.scratch")
        return forks.explain(status, err)


class Builds:
    """The builds that a Compiler has begun. Its methods raise Unfit if a compiler failed and the kernel is not at fault."""

    def __init__(
        self, compiler: Compiler, jobs: dict[Key, Job], device: Future[Any] | None, apart: Sequence[Key]
    ) -> None:
        self.compiler, self._jobs, self._device, self._apart = compiler, jobs, device, apart
        self._found: dict[str, Built | str] = {}  # of those in a sandbox

    def wait(self) -> dict[str, Built | str]:
        """Wait until everything is built. Returns the results by `op/kernel`."""
        if self._device:
            wait([self._device])
        for number, (key, job) in enumerate(self._jobs.items(), 1):
            if not job.done():
                self.compiler.tell(event="build", kernel=key[1], number=number, of=len(self._jobs))
            job.result()
        # In a pool of their own, after the others: ending a builder ends all processes that run beside it.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for key, job in [(key, pool.submit(self.compiler._apart, *key)) for key in self._apart]:
                self._found["/".join(key)] = job.result()
        self._apart = ()
        self.compiler.tell(event="built")
        return self.found

    def wait_for_device(self) -> None:
        """Wait until the program that measures the device's peaks is built."""
        if self._device:
            self.compiler.tell(event="build", kernel="peaks", number=1, of=len(self._jobs) + 1)
            wait([self._device])

    @property
    def found(self) -> dict[str, Built | str]:
        """The results of the builds that have ended, by `op/kernel`."""
        return {"/".join(key): job.result() for key, job in self._jobs.items() if job.done()} | self._found

    @property
    def is_complete(self) -> bool:
        """Whether no compiler runs any more."""
        return all(job.done() for job in self._jobs.values())

    def take_ready(self, cases: list[Case]) -> Case:
        """Wait until the kernel and the baseline of one of the cases are built. Remove and return the first such case."""
        while True:
            for case in cases:
                if all(job.done() for job in self._needed(case)):
                    cases.remove(case)
                    return case
            done = sum(job.done() for job in self._jobs.values())
            name = next(key[1] for key, job in self._jobs.items() if not job.done())
            self.compiler.tell(event="build", kernel=name, number=done + 1, of=len(self._jobs))
            wait([job for case in cases for job in self._needed(case) if not job.done()], return_when=FIRST_COMPLETED)

    def _needed(self, case: Case) -> list[Job]:
        op = ops.get(case.op)
        names = case.kernel, op.baseline(case)
        composed = {other for name in names for other in op.kernels[name].composes}
        return [job for (of, name), job in self._jobs.items() if of in composed or (of == case.op and name in names)]


def needed_by(kernel: Kernel, arch: str) -> list[Kernel]:
    """The kernel itself, and those that a function chooses among which is made of several ops' functions."""
    if not kernel.composes:
        return [kernel]
    from minfer.functional.ahead import choosable  # which imports all functions

    return [kernel, *(each for name in kernel.composes for each in choosable(name, arch))]


def _can_be_built(kernel: Kernel) -> bool:
    """Whether there is something to compile. The supervisor reports which sources cannot be read, and why."""
    try:
        return kernel.needs_build and bool(kernel.sources())
    except ops.SourceError:
        return False
