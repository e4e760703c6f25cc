"""Runs jobs as processes on this machine."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import submitit

from minfer.bench import device
from minfer.bench.device import IMAGE, NO_GPU, driver_too_old
from minfer.jobs.executors.base import Device, Executor, ignore_interrupts
from minfer.jobs.queue import Account, Seen
from minfer.jobs.run import Job, Run
from minfer.plan.config import UserError

TIMEOUT_MIN = 30 * 24 * 60  # what submitit gives a local job, which has no time limit
PATIENCE_S = 20  # how long a job has to end by itself before it is killed


class Local(Executor):
    """A process for each shard."""

    name = "local"
    queued = False

    def find_device(self, wanted: str) -> Device:
        """The GPUs of this machine, or its CPU."""
        found = None if wanted == "cpu" else _find_gpus()
        if found is not None:
            name = found.name if self.container.image is None else ""
            return replace(found, name=name)
        if wanted == "cuda":
            raise UserError(f"device=cuda, and {NO_GPU}")
        why = f" ({NO_GPU})" if IMAGE else ""
        note = f"No CUDA GPU here{why}: running the CPU kernels over the CPU shapes." if wanted == "auto" else ""
        name = "" if self.container.image else device.name(device.pick("cpu"))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device("cpu", name=name, memory=memory, note=note)

    @property
    def shards_per_job(self) -> int:
        return 1

    def count_shards(self, device: Device) -> int:
        return min(self.cluster.max_jobs, device.gpus)  # two shards on one GPU would disturb each other's times

    def choose_nodes(self) -> tuple[list[str], list[str]]:
        raise UserError("cluster.distribute needs SLURM; use cluster=slurm, or leave it out")

    def list_models(self) -> list[str]:
        return []

    def find_most(self) -> dict[str, float]:
        return {"time_min": math.inf, "memory_gb": math.inf}

    def script(self, run: Run, jobs: int, where: str | None = None) -> str:
        raise UserError("dry_run=script shows what SLURM is given, and jobs run without it here; choose cluster=slurm")

    def submit(self, run: Run, shards: Sequence[str], retry: int = 0) -> list[Job]:
        """Start a process for each shard, with a GPU of its own if the run has several shards."""
        self.preflight()
        if self.container.image is not None:
            self.check_paths(run)
        run.copy_sources()
        executor = submitit.LocalExecutor(folder=run.folder / "jobs", python=self.python(run))
        executor.update_parameters(timeout_min=TIMEOUT_MIN)
        files = run.shards
        gpus = [_choose_gpu(int(name), len(files)) for name in shards]
        with ignore_interrupts():
            return self._start(run, executor, [[files[name]] for name in shards], gpus, retry)

    def _in_job(self, start: str, inside: str) -> str:
        return f"{start} {inside}"  # the job keeps the environment, and the caches in the user's home

    @classmethod
    def states(cls, run: Run, jobs: Collection[Job]) -> dict[str, Seen] | None:
        return {job.id: Seen("RUNNING") for job in jobs if _is_running(run, job.id)}

    @classmethod
    def accounts(cls, jobs: Collection[Job]) -> dict[str, Account]:
        return {}

    @classmethod
    def cancel(cls, run: Run, jobs: Collection[str]) -> list[str]:
        """End jobs and wait for them, so that nothing is left running."""
        deadline = time.monotonic() + PATIENCE_S
        while running := [job for job in jobs if _is_running(run, job)]:
            for job in running:
                # Repeated, because a job that is still importing has no handler yet. submitit forwards the signal to the job.
                try:
                    os.kill(int(job), signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.2)
        return []


def _has_driver() -> bool:
    return Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists()


def _find_gpus() -> Device | None:
    """The visible GPUs, with the compute capability of the first; nameless if they are of several models. Asks a process of its
    own, so that this one creates no CUDA context.

    Raises UserError if the GPU's driver is too old: `device=auto` must not silently take the CPU then."""
    if not _has_driver():
        return None
    probe = "from torch import cuda; print(*cuda.get_device_capability()); "
    probe += "found = [cuda.get_device_properties(gpu) for gpu in range(cuda.device_count())]; "
    probe += "print(max(each.total_memory for each in found)); [print(each.name) for each in found]"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    if why := driver_too_old(done.stderr):
        raise UserError(f"{why}; or use device=cpu")
    if done.returncode or not done.stdout:
        return None
    capability, memory, *names = done.stdout.splitlines()
    major, minor = map(int, capability.split())
    return Device("cuda", (major, minor), len(names), names[0] if len(set(names)) == 1 else "", float(memory))


def _choose_gpu(shard: int, total: int) -> str | None:
    """The CUDA_VISIBLE_DEVICES of a shard: a GPU of its own if the run has several shards, else the user's value."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if total == 1 or visible == "":
        return visible
    names = visible.split(",") if visible else [str(index) for index in range(total)]
    return names[shard % len(names)]


def _is_running(run: Run, job: str) -> bool:
    """Whether the process of a job is running, and its id was not reused by another process."""
    try:
        return os.fsencode(run.name) in Path(f"/proc/{job}/cmdline").read_bytes()  # empty for one that has ended
    except OSError:
        return False
