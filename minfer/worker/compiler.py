"""Compiles what a shard needs: several kernels at once, each in a process of its own, before anything is timed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from minfer import build, ops
from minfer.bench import peaks
from minfer.ops import Case
from minfer.plan.shard import Shard, Unfit
from minfer.process.text import plain


class Compiler:
    """The compilers that a shard starts for `arch`, "" without a GPU; `tell` is called as they get on."""

    def __init__(self, shard: Shard, arch: str, tell: Callable[..., None]) -> None:
        self.shard, self.arch, self.tell = shard, arch, tell

    def compile(self, cases: Iterable[Case]) -> dict[str, build.Built | str]:
        """What became of each `op/kernel` of the cases that has to be built; a str is why it failed. Raises Unfit."""
        kernels = {(case.op, case.kernel): ops.get(case.op).kernels[case.kernel] for case in cases}
        found: dict[str, build.Built | str] = {}
        self.tell(event="building")
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            if self.arch and not build.cached(peaks.KERNEL, self.arch):  # the child says it if this fails
                pool.submit(self.run, "peaks", [sys.executable, "-m", "minfer.bench.peaks", self.arch])
            jobs = {key: pool.submit(self._one, *key) for key, kernel in kernels.items() if kernel.needs_build}
            for (op, name), job in jobs.items():
                self.tell(event="build", kernel=name)
                found[f"{op}/{name}"] = job.result()
        self.tell(event="built")
        return found

    def _one(self, op: str, name: str) -> build.Built | str:
        if found := build.cached(ops.get(op).kernels[name], self.arch):
            return build.Built(**asdict(found) | {"seconds": None})
        done = self.run(name, [sys.executable, "-m", "minfer.build", op, name, self.arch, *self.shard.extra])
        if isinstance(done, str):
            return done
        try:
            return build.Built(**json.loads(done.stdout))
        except (ValueError, TypeError, RecursionError):
            return "its build gave no reply: what is loaded with it ended the process or wrote to it"

    def run(self, name: str, command: list[str]) -> subprocess.CompletedProcess[str] | str:
        """Run one. A str is why it failed; raises Unfit where that is not the kernel's fault."""
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
        try:
            out, err = process.communicate(timeout=self.shard.build_timeout_s)
        except subprocess.TimeoutExpired:
            return f"the compiler was killed after {self.shard.build_timeout_s:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode == 0:
            return subprocess.CompletedProcess(command, 0, out, err)
        with open(Path(self.shard.folder) / "logs" / f"{self.shard.name}.{name}.build.log", "w") as log:
            log.write(err)
        if full := build.DISK_FULL.search(err):
            where = os.environ.get("TORCH_EXTENSIONS_DIR", "the cache of compiled kernels")
            raise Unfit(f"cannot compile {name} in {where}: {full[0]}; free it or set cluster.scratch")
        lines = [line for line in map(plain, err.splitlines()) if line]
        return lines[-1] if lines else f"the build died with status {process.returncode}"
