"""The interface of an executor; `local.py` and `slurm.py` implement it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from submitit.core.core import PicklingExecutor

from minfer.jobs import node
from minfer.jobs.logs import PREFIX
from minfer.jobs.queue import Account, Seen
from minfer.jobs.run import Job, Run
from minfer.plan.config import Cluster, Config, Container, UserError


@dataclass(frozen=True)
class Device:
    """The device that jobs run on. If SLURM has yet to choose the node, only the kind is known."""

    kind: str  # "cuda" or "cpu"
    capability: tuple[int, int] | None = None
    gpus: int = 1  # on this machine
    name: str = ""  # as rows name it, if a job is sure to find the same one and the same software
    memory: float = math.inf  # bytes of one of them, where it is known
    note: str = ""  # for the user, if minfer chose where jobs run, or their device


@dataclass(frozen=True)
class Executor(ABC):
    """Starts the jobs of a run, reports their states, and cancels them."""

    name: ClassVar[str]
    queued: ClassVar[bool]  # whether jobs wait in a queue and have time and memory limits

    cluster: Cluster
    container: Container

    @abstractmethod
    def find_device(self, wanted: str) -> Device:
        """The device that jobs get; `wanted` is auto, cuda or cpu. Raises UserError."""

    @property
    @abstractmethod
    def shards_per_job(self) -> int:
        """How many shards a job runs at once."""

    @abstractmethod
    def count_shards(self, device: Device) -> int:
        """How many shards a matrix is split into at most."""

    @abstractmethod
    def choose_nodes(self) -> tuple[list[str], list[str]]:
        """The nodes that `cluster.distribute` chooses, and a sentence for each node that is left out. Raises UserError."""

    @abstractmethod
    def list_models(self) -> list[str]:
        """The GPU models that a job may get if it asks for any GPU; empty if there is only one."""

    @abstractmethod
    def find_most(self) -> dict[str, float]:
        """The largest `time_min` and `memory_gb` that a job with its GPUs can get; infinite if unknown."""

    def list_set_aside(self) -> list[str]:
        """Sentences for the user on what jobs do not get from this shell's environment."""
        return []

    @abstractmethod
    def script(self, run: Run, jobs: int, where: str | None = None) -> str:
        """The script that would be submitted for this many jobs, all on the node `where` if it is given. Submits nothing.
        Raises UserError."""

    @abstractmethod
    def submit(self, run: Run, shards: Sequence[str], retry: int = 0) -> list[Job]:
        """Start the jobs of shards, note them in the run's folder and return at once. The caller must hold the run's lock.
        Raises UserError if something that jobs need is missing, or SLURM refuses."""

    @classmethod
    @abstractmethod
    def states(cls, run: Run, jobs: Collection[Job]) -> dict[str, Seen] | None:
        """The queue's entry for each job that has not ended, by its id. It also has jobs of the run that are not among `jobs`,
        because their line in the run's folder was lost. None if the queue does not answer, or hides jobs from this user."""

    @classmethod
    @abstractmethod
    def accounts(cls, jobs: Collection[Job]) -> dict[str, Account]:
        """The accounting record of each job, by its id."""

    @classmethod
    @abstractmethod
    def cancel(cls, run: Run, jobs: Collection[str]) -> list[str]:
        """Cancel jobs, named by their ids. Returns a sentence for each that could not be cancelled."""

    @abstractmethod
    def _in_job(self, start: str, inside: str) -> str:
        """The command that replaces `python` in a job: `start` is apptainer with its options, `inside` what it runs."""

    def with_resources(self, own: dict[str, Any], raised: bool = False) -> Self:
        """An executor like this one whose jobs ask for `own`, keys of `cluster`. With `raised`, this executor's time and memory
        stay, because they have been raised for these jobs."""
        kept = ("time_min", "memory_gb") if raised else ()
        changes: dict[str, Any] = {key: value for key, value in own.items() if key not in kept}
        return replace(self, cluster=replace(self.cluster, **changes))

    def preflight(self) -> None:
        """Check what can be known before a job is started. Raises UserError."""
        if self.container.image is None:
            return
        image = Path(self.container.image).expanduser().absolute()
        if not image.exists():
            raise UserError(
                f"the container image {image} does not exist; build it (docker build -t minfer . && apptainer build "
                f"--build-arg BOOTSTRAP=docker-daemon --build-arg IMAGE=minfer:latest {image} apptainer.def), name "
                "another with container.image, or use container=none"
            )
        if not os.access(image, os.R_OK):
            raise UserError(f"the container image {image} cannot be read; make it readable (chmod a+r)")
        if shutil.which("apptainer") is None:
            raise UserError(
                "container=apptainer needs apptainer, which is not on the PATH; load its module or use container=none"
            )

    def check_paths(self, run: Run) -> None:
        """Raise UserError for folders whose names cannot be passed to jobs: sbatch reads its options line by line and loses
        backslashes, and colons and commas end a path for Python or Apptainer."""
        for path in (str(run.folder), run.request.results, *_kernel_folders(run.request), self.cluster.scratch or ""):
            if not path.isprintable() or re.search(r"[:,\\]", path):
                raise UserError(
                    f"the folder {path!r} has a colon, comma, backslash or control character in its name, and cannot "
                    "be passed to jobs; rename it or choose another"
                )

    def python(self, run: Run) -> str | None:
        """The command that replaces `python` in a job and runs it in the container; None without a container. Inside, the job
        sees the run's sources (read-only), the run's folder, the results and the node's scratch. It sees nothing else of the
        clone and, under SLURM, not the user's home. Kernels that are not trusted have no network."""
        if self.container.image is None:
            return None
        image = Path(self.container.image).expanduser().absolute()
        folder, sources, results, kernels = run.folder, run.sources, run.request.results, _kernel_folders(run.request)
        places = [str(folder), *(f"{path}:{path}:ro" for path in (sources, *kernels)), results, *self.container.binds]
        places += [self.cluster.scratch] if self.cluster.scratch else []
        options = [f"--bind {shlex.quote(path)}" for path in places]
        options += [
            f"--pwd {shlex.quote(str(sources))} --env PYTHONPATH={shlex.quote(str(sources))} --env PYTHONSAFEPATH=1"
        ]
        options += ["--net --network none"] if run.request.untrusted else []
        script = _wrap_python([folder, sources, *kernels, results])
        inside = f"{shlex.quote(str(image))} sh -c {shlex.quote(script)} sh"
        return self._in_job(f"apptainer exec --nv {' '.join(options)}", inside)

    @property
    def grace_s(self) -> int:
        """cluster.grace_s, but at most a third of the time limit."""
        cluster = self.cluster
        return cluster.grace_s if cluster.time_min is None else min(cluster.grace_s, 20 * cluster.time_min)

    def _start(
        self, run: Run, executor: PicklingExecutor, jobs: list[list[Path]], gpus: list[str | None], retry: int
    ) -> list[Job]:
        """Start jobs with submitit's executor, each with the files of its shards, and note them; `gpus` has the
        CUDA_VISIBLE_DEVICES of each."""
        n, cluster = len(jobs), self.cluster
        run.announce([path.stem for paths in jobs for path in paths])
        with _environment(run):
            started = executor.map_array(
                node.run, [list(map(str, paths)) for paths in jobs], [cluster.scratch] * n, [self.grace_s] * n, gpus,
                [cluster.gres] * n,
            )  # fmt: skip
        asked = retry, cluster.time_min, cluster.memory_gb
        new = [
            Job(path.stem, job.job_id, self.name, *asked)
            for paths, job in zip(jobs, started, strict=True)
            for path in paths
        ]
        run.add_jobs(new)  # at once, so that later commands find what was submitted
        return new


def _kernel_folders(request: Config) -> list[str]:
    """The folders of the files that a user's kernels are in."""
    return list(dict.fromkeys(str(Path(path).parent) for path in request.extra))


def _wrap_python(folders: Iterable[Path | str]) -> str:
    """A shell script that starts Python in a container, or exits with a sentence if a folder is missing there. Apptainer only
    skips a folder that the site does not let it bind, and Python would fail to import what it needs."""
    remedy = "; have the site allow it (user bind control = yes in apptainer.conf), or use container=none"
    sentences = [
        (shlex.quote(str(f)), shlex.quote(f"{PREFIX}apptainer did not bind {f} into the container{remedy}"))
        for f in folders
    ]
    return (
        "".join(f"[ -d {folder} ] || {{ echo {why} >&2; exit 1; }}; " for folder, why in sentences) + 'exec python "$@"'
    )


@contextlib.contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Ignore SIGINT in this process and in the jobs that it starts: Ctrl-C in a terminal goes to every process of its group,
    but local jobs are to be ended by `cancel`, so that they can clean up."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def import_path(run: Run) -> dict[str, str]:
    """The environment variables with which a job imports the run's own copy of the sources."""
    path = os.pathsep.join(filter(None, [str(run.sources), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def _environment(run: Run) -> Iterator[None]:
    """Set what jobs inherit: they import the run's own copy of the sources, not the installed ones, and never a file from
    the folder where the launcher was called."""
    theirs = import_path(run)
    before = {name: os.environ.get(name) for name in theirs}
    os.environ |= theirs
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
