"""What an executor can answer and do; `local.py` and `slurm.py` are its two forms."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from submitit.core.core import PicklingExecutor

from minfer.jobs import node
from minfer.jobs.logs import PREFIX
from minfer.jobs.queue import Account, Seen
from minfer.jobs.run import Job, Run
from minfer.plan.config import Cluster, Config, Container, UserError


@dataclass(frozen=True)
class Device:
    """What jobs run on. Of a node that SLURM has yet to choose, only the kind is known."""

    kind: str  # "cuda" or "cpu"
    capability: tuple[int, int] | None = None
    gpus: int = 1  # how many there are here
    note: str = ""  # why `device=auto` is not what a user may expect


@dataclass(frozen=True)
class Executor(ABC):
    """Starts the jobs of a run, and says what becomes of them."""

    name: ClassVar[str]
    queued: ClassVar[bool]  # whether jobs wait in a queue, and have limits of time and memory

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
        """The nodes that `cluster.distribute` stands for, and a sentence for each that is left out. Raises UserError."""

    @abstractmethod
    def list_models(self) -> list[str]:
        """The models of GPU that a job of no particular model may get, where there are several."""

    @abstractmethod
    def find_most(self) -> dict[str, float]:
        """The most that a job with its GPUs can have of `time_min` and `memory_gb`, as far as is known."""

    @abstractmethod
    def script(self, run: Run, jobs: int, where: str | None = None) -> str:
        """What is submitted for a run of so many jobs, all on the node `where` if there is one; nothing is submitted.
        Raises UserError."""

    @abstractmethod
    def submit(self, run: Run, shards: Sequence[str], retry: int = 0) -> list[Job]:
        """Start the jobs of shards, note them in the run's folder and return at once. Whoever calls this has the run's lock.
        Raises UserError when something that jobs need is not there, or SLURM refuses."""

    @classmethod
    @abstractmethod
    def states(cls, run: Run, jobs: Collection[Job]) -> dict[str, Seen] | None:
        """What is known of each job, by its id; one that is over is not in it. None when the queue does not answer."""

    @classmethod
    @abstractmethod
    def accounts(cls, jobs: Collection[Job]) -> dict[str, Account]:
        """What is accounted of each job, by its id."""

    @classmethod
    @abstractmethod
    def cancel(cls, run: Run, jobs: Collection[Job]) -> None:
        """End jobs."""

    @abstractmethod
    def _in_job(self, start: str, inside: str) -> str:
        """The command that stands for `python` in a job, from Apptainer's with its options and what that is to run."""

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
        """Raise UserError for folders that jobs could not be told of: sbatch reads its options line by line and loses
        backslashes, and colons and commas end a path for Python or Apptainer."""
        for path in (str(run.folder), run.request.results, *_kernel_folders(run.request), self.cluster.scratch or ""):
            if not path.isprintable() or re.search(r"[:,\\]", path):
                raise UserError(
                    f"the folder {path!r} has a colon, comma, backslash or control character in its name, of which jobs "
                    "could not be told; rename it or choose another"
                )

    def python(self, run: Run) -> str | None:
        """The command that stands for `python` in a job: inside the container, where there is one. It sees the run's sources,
        which it cannot write, the run's folder, the results and the node's scratch; nothing else of the clone and, under
        SLURM, not the user's home. Kernels that are not trusted have no network."""
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
        """cluster.grace_s, but of a short time limit a third at most."""
        cluster = self.cluster
        return cluster.grace_s if cluster.time_min is None else min(cluster.grace_s, 20 * cluster.time_min)

    def _start(
        self, run: Run, executor: PicklingExecutor, jobs: list[list[Path]], gpus: list[str | None], retry: int
    ) -> list[Job]:
        """Start jobs, each with the files of its shards, through submitit's executor, and note them; `gpus` are their
        CUDA_VISIBLE_DEVICES."""
        n, cluster = len(jobs), self.cluster
        run.announce([path.stem for paths in jobs for path in paths])
        with _environment(run), contextlib.redirect_stderr(io.StringIO()):  # sbatch's complaint is in the error
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
        run.add_jobs(new)  # at once: what was submitted must be found again
        return new


def _kernel_folders(request: Config) -> list[str]:
    """The folders of the files that a user's kernels are in."""
    return list(dict.fromkeys(str(Path(path).parent) for path in request.extra))


def _wrap_python(folders: Iterable[Path | str]) -> str:
    """A script that takes Python's place in a container: it ends with a sentence where the container does not have a folder.
    Apptainer goes on without what a site does not let it bind, and Python would not find what it is to import."""
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
    """Ctrl-C in a terminal goes to every process of its group. Local jobs inherit that it is ignored, and `cancel` ends them
    in order."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def import_path(run: Run) -> dict[str, str]:
    """The environment by which a job imports the run's own copy of the sources."""
    path = os.pathsep.join(filter(None, [str(run.sources), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def _environment(run: Run) -> Iterator[None]:
    """What jobs inherit: they import the run's own copy of the sources, not those that are installed, and never what lies
    where the launcher was called."""
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
