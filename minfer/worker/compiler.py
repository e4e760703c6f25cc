"""Compiles the kernels of a shard before anything is timed: several at once, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from minfer import ops
from minfer.bench import peaks
from minfer.build import cache, forks
from minfer.build.cache import Built
from minfer.build.errors import DISK_FULL, BuildError
from minfer.ops import Case, Kernel
from minfer.plan.shard import Shard, Unfit
from minfer.process.death import Died
from minfer.process.remote import Process
from minfer.sandbox import Sandbox
from minfer.worker import sandboxed

LARGEST = 1 << 30  # bytes of a library from a sandbox


class Compiler:
    """Starts the compilers of a shard. `arch` is "" without a GPU; `tell` is called with each event."""

    def __init__(self, shard: Shard, arch: str, tell: Callable[..., None], sandbox: Sandbox | None = None) -> None:
        self.shard, self.arch, self.tell, self.sandbox = shard, arch, tell, sandbox

    def compile(self, cases: Iterable[Case]) -> dict[str, Built | str]:
        """Build what the cases need. Returns, by `op/kernel`, what was built, or a str that says why building failed. Raises
        Unfit."""
        kernels = {(case.op, case.kernel): ops.get(case.op).kernels[case.kernel] for case in cases}
        apart = {
            key for key, kernel in kernels.items() if self.sandbox and not kernel.source.is_relative_to(ops.PACKAGE)
        }
        found: dict[str, Built | str] = {}
        self.tell(event="building")
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            if self.arch and not cache.find(peaks.KERNEL, self.arch):  # if this fails, the child reports it
                pool.submit(self.run, "peaks", "minfer.bench.peaks", self.arch)
            self._wait(pool, self._one, kernels.keys() - apart, found)
        # In a pool of their own, after the others: ending a builder ends all processes that run beside it.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            self._wait(pool, self._apart, apart, found)
        self.tell(event="built")
        return found

    def _wait(
        self,
        pool: ThreadPoolExecutor,
        compile_one: Callable[[str, str], Built | str],
        kernels: Iterable[tuple[str, str]],
        found: dict[str, Built | str],
    ) -> None:
        chosen = [key for key in sorted(kernels) if _can_be_built(ops.get(key[0]).kernels[key[1]])]
        jobs = [(key, pool.submit(compile_one, *key)) for key in chosen]
        for number, ((op, name), job) in enumerate(jobs, 1):
            self.tell(event="build", kernel=name, number=number, of=len(jobs))
            found[f"{op}/{name}"] = job.result()

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


def _can_be_built(kernel: Kernel) -> bool:
    """Whether there is something to compile. The supervisor reports which sources cannot be read, and why."""
    try:
        return kernel.needs_build and bool(kernel.sources())
    except ops.SourceError:
        return False
