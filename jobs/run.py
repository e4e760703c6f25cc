"""What the folder of a run records of it for later commands: its request, its sources, its shards, the jobs that they
became."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from minfer.plan.config import PACKAGE, Config, UserError, check_values, nearest
from minfer.plan.mistakes import explain

CONFIG, JOBS, COPY = "config.yaml", "jobs.jsonl", "sources"


@dataclass(frozen=True)
class Job:
    """A shard as it was submitted; `id` is SLURM's, such as `12_3`, or a process of this machine. `time_min` and `memory_gb`
    are what the job asked for, and `retry` how often more than at first."""

    shard: str
    id: str
    executor: str  # slurm or local
    retry: int = 0
    time_min: int | None = None
    memory_gb: int | None = None


def find(word: str) -> Path:
    """The folder of a run, by its path or by its name under `runs`; `last` is the newest one. Raises UserError."""
    known = [folder.name for folder in everything()]
    if word == "last" and known:
        word = known[-1]
    for folder in (Path(word), Path("runs") / word):
        if (folder / CONFIG).is_file():
            return folder.absolute()
    hint = nearest(word, known[-20:]) if known else "name its folder"
    raise UserError(f"there is no run {word}; {hint}")


def everything(runs: Path = Path("runs")) -> list[Path]:
    """The folders of all runs, the oldest first: a run's name begins with its time."""
    return sorted((path.parent for path in runs.glob(f"*/{CONFIG}")), key=lambda folder: folder.name)


def request(folder: Path, changes: Iterable[str] = ()) -> Config:
    """The request of a run, as `key=value` words change it: `cluster.flags={}` clears the flags, and `cluster.flags.begin=now`
    changes one of them. Raises UserError."""
    changes = list(changes)
    for word in changes:
        if not word.startswith(("cluster.", "container.")) or "=" not in word:
            raise UserError(f"cannot change {word!r} of a run; only cluster.* and container.* can, as key=value")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(folder / CONFIG))
        config: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(f"cannot read {folder / CONFIG}: {str(error).splitlines()[0]}") from error
    for word in changes:
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


def sources(folder: Path) -> Path:
    """The run's own read-only copy of what its jobs run, made by the first call: edits of the checkout come too late."""
    copy = folder / COPY
    if not copy.exists():
        partial = folder / "sources.tmp"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(PACKAGE, partial / "minfer")  # compiled files, too: jobs need not do it at once
        for path in partial.rglob("*.*"):
            if path.is_file():
                path.chmod(0o444)
        partial.rename(copy)
    return copy


def announce(folder: Path, names: Iterable[str]) -> None:
    """Note in the progress of shards that they are about to be submitted: what it said before is of earlier jobs."""
    (folder / "progress").mkdir(exist_ok=True)
    tell(folder, names, event="submitted")


def tell(folder: Path, names: Iterable[str], **event: Any) -> None:
    """Add an event to the progress of shards."""
    for name in names:
        with open(folder / "progress" / f"{name}.jsonl", "a") as file:
            file.write(json.dumps({"time": time.time()} | event) + "\n")


def add(folder: Path, jobs: Iterable[Job]) -> None:
    """Note jobs that were submitted."""
    path = folder / JOBS
    cut = path.exists() and not path.read_bytes().endswith(b"\n")  # by a process that was killed while it wrote
    with open(path, "a") as file:
        file.write("\n" if cut else "")
        file.writelines(json.dumps({"time": time.time()} | asdict(job)) + "\n" for job in jobs)


def submitted(folder: Path) -> list[Job]:
    """Every job that was ever submitted, in order. A line that cannot be read, as of a process that was killed while it
    wrote, is left out."""
    path = folder / JOBS
    found = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
            more = {name: line[name] for name in ("retry", "time_min", "memory_gb") if name in line}
            found.append(Job(line["shard"], line["id"], line["executor"], **more))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def jobs(folder: Path) -> dict[str, Job]:
    """The last job of each shard."""
    return {job.shard: job for job in submitted(folder)}


@contextlib.contextmanager
def submitting(folder: Path) -> Iterator[None]:
    """Whoever submits jobs of a run is alone with it: two at once would queue each shard twice. The lock ends with the
    process. Raises UserError where another one has it."""
    with open(folder / "submit.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"jobs of {folder.name} are being submitted from another shell; wait for it, and try again"
            ) from error
        yield


def shards(folder: Path) -> dict[str, Path]:
    """The file of each shard, by its name."""
    return {path.stem: path for path in sorted((folder / "shards").glob("*.json"))}
