"""A run is one launch. Its folder keeps its request, sources, shards, jobs and their progress, so that later commands can
continue it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from minfer.plan.config import PACKAGE, Config, UserError, check_values, nearest
from minfer.plan.mistakes import explain

if TYPE_CHECKING:
    from minfer.rows import store

RUNS = Path("runs")  # where `minfer` looks for runs by their names
CONFIG, JOBS, COPY, CANCELLED = "config.yaml", "jobs.jsonl", "sources", "cancelled"


@dataclass(frozen=True)
class Job:
    """A shard as it was submitted; `id` is SLURM's, such as `12_3`, or a process id. `time_min` and `memory_gb` are what the
    job asked for, and `retry` is how often these limits have been raised."""

    shard: str
    id: str
    executor: str  # a name of minfer.jobs.executors
    retry: int = 0
    time_min: int | None = None
    memory_gb: int | None = None


class Run:
    """The files in a run's folder. Each is read only when it is needed, so a run whose request is broken can be cancelled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.sources = folder / COPY  # what its jobs import, once `copy_sources` has made it
        self._changed: set[str] = set()  # keys of the request that `change_request` has changed

    @classmethod
    def create(cls, folder: Path, request: Config) -> Run:
        """Make a new run in `folder`, and write the request there."""
        run = cls(folder)
        run.request = request
        (folder / CONFIG).write_text(OmegaConf.to_yaml(OmegaConf.structured(request)))
        return run

    @classmethod
    def find(cls, word: str) -> Run:
        """A run by its path or by its name under `runs`; `last` is the newest one. Raises UserError."""
        names = [run.name for run in cls.list_all()]
        if word == "last" and names:
            word = names[-1]
        for folder in (Path(word), RUNS / word):
            if (folder / CONFIG).is_file():
                return cls(folder.absolute())
        hint = nearest(word, names[-20:]) if names else "name its folder"
        raise UserError(f"there is no run {word}; {hint}")

    @classmethod
    def list_all(cls) -> list[Run]:
        """All runs under `runs`, the oldest first by the file system's time: the local time in a run's name goes back an hour
        once a year, and depends on the time zone."""
        files = sorted(RUNS.glob(f"*/{CONFIG}"), key=lambda path: (path.stat().st_mtime_ns, path.parent.name))
        return [cls(path.parent) for path in files]

    @cached_property
    def request(self) -> Config:
        """The request. Raises UserError if its file cannot be read."""
        return self._read_request([])

    def change_request(self, changes: list[str]) -> None:
        """Change the request from now on, but not its file, by `key=value` words: `cluster.flags={}` clears the flags, and
        `cluster.flags.begin=now` changes one of them. Raises UserError."""
        self.request = self._read_request(changes)
        self._changed |= {word.lstrip("+").partition("=")[0] for word in changes}

    def choose_resources(self, shard: str) -> dict[str, Any]:
        """The keys of `cluster` that the shard's sweep states for its jobs, less those that `change_request` has changed."""
        stated = json.loads((self.folder / "shards" / f"{shard}.json").read_text()).get("resources", {})
        return {key: value for key, value in stated.items() if f"cluster.{key}" not in self._changed}

    def _read_request(self, changes: list[str]) -> Config:
        for word in changes:
            if not word.lstrip("+").startswith(("cluster.", "container.")) or "=" not in word:
                raise UserError(f"cannot change {word!r} of a run; only cluster.* and container.* can, as key=value")
        file = self.folder / CONFIG
        try:
            merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(file))
            config: Any = OmegaConf.to_object(merged)
        except OmegaConfBaseException as error:
            raise UserError(f"cannot read {file}: {str(error).splitlines()[0]}") from error
        for word in changes:
            word = word.lstrip("+")  # as for a launch
            key = word.partition("=")[0]
            try:
                OmegaConf.update(merged, key, OmegaConf.select(OmegaConf.from_dotlist([word]), key), merge=False)
                config = OmegaConf.to_object(merged)
            except YAMLError as error:
                raise UserError(f"cannot read {word!r}; write it as key=value") from error
            except OmegaConfBaseException as error:
                raise UserError(explain(error, changes)) from error
        check_values(config)
        return config

    @property
    def age_s(self) -> float:
        """Seconds since it was launched."""
        return time.time() - (self.folder / CONFIG).stat().st_mtime

    @cached_property
    def owner(self) -> int:
        """The id of the user who launched it, who also owns its jobs."""
        return self.folder.stat().st_uid

    def copy_sources(self) -> None:
        """Give the run its own read-only copy of the sources, if it has none, so that later edits do not affect its jobs.
        Raises UserError if they cannot be copied."""
        if self.sources.exists():
            return
        partial = self.folder / "sources.tmp"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            shutil.copytree(PACKAGE, partial / "minfer")  # with __pycache__, so that no job has to compile it
        except shutil.Error as error:  # has a line for each file
            why = re.sub(r"^\[Errno \d+\] ([^:]+).*", r"\1", str(error.args[0][0][2]))
            raise UserError(
                f"cannot copy the sources to {self.folder}: {why}; free space there, or choose another folder with runs="
            ) from error
        for path in partial.rglob("*.*"):
            if path.is_file():
                path.chmod(0o444)
        partial.rename(self.sources)

    @property
    def shards(self) -> dict[str, Path]:
        """The file of each shard, by its name."""
        return {path.stem: path for path in sorted((self.folder / "shards").glob("*.json"))}

    @property
    def progress_files(self) -> Path:
        """The folder with a file of events for each shard."""
        return self.folder / "progress"

    def announce(self, shards: Iterable[str]) -> None:
        """Note in the progress of shards that they are about to be submitted; events before this are of earlier jobs."""
        self.progress_files.mkdir(exist_ok=True)
        self.tell(shards, event="submitted")

    def tell(self, shards: Iterable[str], **event: Any) -> None:
        """Add an event to the progress of shards."""
        for name in shards:
            with open(self.progress_files / f"{name}.jsonl", "a") as file:
                file.write(json.dumps({"time": time.time()} | event) + "\n")

    def add_jobs(self, jobs: Iterable[Job]) -> None:
        """Note jobs that were submitted."""
        path = self.folder / JOBS
        cut = path.exists() and not path.read_bytes().endswith(b"\n")  # a process was killed while it wrote
        with open(path, "a") as file:
            file.write("\n" if cut else "")
            file.writelines(json.dumps({"time": time.time()} | asdict(job)) + "\n" for job in jobs)

    @property
    def all_jobs(self) -> list[Job]:
        """Every job that was ever submitted, in order. Skips a line that cannot be read, such as one from a process that was
        killed while it wrote."""
        path = self.folder / JOBS
        found = []
        for text in path.read_text(errors="replace").splitlines() if path.exists() else []:
            try:
                line = json.loads(text)
                more = {name: line[name] for name in ("retry", "time_min", "memory_gb") if name in line}
                found.append(Job(line["shard"], line["id"], line["executor"], **more))
            except (ValueError, KeyError, TypeError):
                continue
        return found

    @property
    def jobs(self) -> dict[str, Job]:
        """The last job of each shard."""
        return {job.shard: job for job in self.all_jobs}

    def log(self, job: Job, stream: str = "err") -> Path:
        """What a job wrote, to `err` or `out`, as submitit names it."""
        return self.folder / "jobs" / f"{job.id}_0_log.{stream}"

    @contextlib.contextmanager
    def lock(self, patience_s: float = 0.0) -> Iterator[None]:
        """Hold the run's lock, which submitting its jobs needs: two processes at once would queue each shard twice. The lock
        ends with the process. Raises UserError if another process holds it for longer than `patience_s`, and if this user may
        not write to the folder."""
        deadline = time.monotonic() + patience_s
        try:
            file = open(self.folder / "submit.lock", "w")  # noqa: SIM115  # closed below
        except PermissionError as error:
            raise UserError(f"only the owner of {self.name} may submit and cancel its jobs; ask them") from error
        with file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if time.monotonic() >= deadline:
                        raise UserError(
                            f"jobs of {self.name} are being submitted from another shell; wait for it, and try again"
                        ) from error
                time.sleep(0.1)
            yield

    @property
    def cancelled(self) -> bool:
        """Whether its jobs were cancelled by `minfer cancel` since it was last submitted."""
        return (self.folder / CANCELLED).exists()

    def mark_cancelled(self, cancelled: bool) -> None:
        """Record whether its jobs were cancelled. A process that is still submitting jobs reads this and stops."""
        mark = self.folder / CANCELLED
        mark.touch() if cancelled else mark.unlink(missing_ok=True)

    @property
    def row_files(self) -> list[Path]:
        """The run's parquet files. Raises UserError if the request cannot be read."""
        from minfer.rows import store  # imports pyarrow; here, so that a typo is reported without it

        results = Path(self.request.results).absolute()
        return [path for folder in sorted(results.glob(f"*/{self.name}")) for path in store.files(folder)]

    def rows(self, columns: Iterable[str]) -> dict[tuple[str, str], store.Row]:
        """The newest row of each case, by shard and case; a case that was run again has several rows. Within a folder the
        newest row is the last one in the order of the files, because the clocks of nodes may differ. Raises UserError if the
        request cannot be read."""
        from minfer.rows import store  # imports pyarrow; here, so that a typo is reported without it

        finished = lambda row: row["finished"].timestamp() if row["finished"] else 0.0
        found: dict[tuple[str, str], tuple[Path, store.Row]] = {}
        for path in self.row_files:
            shard = path.stem.rpartition("-")[0]
            for row in store.rows([path], {"case", "finished", *columns}):
                folder, old = found.get((shard, row["case"]), (path.parent, row))
                if folder == path.parent or finished(old) <= finished(row):
                    found[shard, row["case"]] = path.parent, row
        return {key: row for key, (_, row) in found.items()}
