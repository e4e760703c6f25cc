"""One run: plan the cases, submit the shards, follow them, show the table."""

from __future__ import annotations

import datetime
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from minfer import ops
from minfer.bench.device import IMAGE, NO_GPU, driver_too_old
from minfer.jobs import partition as distribute
from minfer.jobs import preflight, queue
from minfer.jobs import run as record
from minfer.jobs.executors import slurm as submit
from minfer.plan import cases, shell
from minfer.plan import extra as extra_files
from minfer.plan.config import CONF, INSTALLED, SCRIPT, Config, UserError, choose, named
from minfer.plan.shard import Shard, outside
from minfer.run import notify, retries
from minfer.run import terminal as report
from minfer.run.progress import RunProgress
from minfer.run.terminal import follow, print_plan, print_summary, relative


def run(config: Config) -> int:
    """Plan a request, run it, and show what came of it; the exit status: 1 when cases got no row. Raises UserError."""
    console = report.console()
    extra = [str(Path(path).absolute()) for path in config.extra]
    for path in extra:
        if not Path(path).is_file():
            raise UserError(f"extra={path} does not exist")
        extra_files.load(path)
    executor = submit.executor_name(config.cluster)
    device, capability, gpus = device_of(config, executor, console)
    if device == "cpu":
        config.cluster.gres = (
            ",".join(w for w in (config.cluster.gres or "").split(",") if not preflight.gpus(w)) or None
        )
    config.profiler.resolve(device)
    config.timing = config.timing.on(device)
    plan = cases.plan(config, device, capability)
    if device == "cpu" and config.profiler.static:
        console.print("CUDA kernels are not timed here; profiler=static compiles them and reads their machine code.")
    for op, kernel in dict.fromkeys((case.op, case.kernel) for case in plan.cases):
        if not (source := ops.get(op).kernels[kernel].source).is_file():
            raise UserError(
                f"the source of kernel {kernel}, {source}, does not exist; write it or remove its registration"
            )
    if executor == "slurm":
        most = config.cluster.max_jobs * submit.shards_per_job(config.cluster, executor)
    else:
        most = min(config.cluster.max_jobs, gpus)  # two shards on one GPU would time each other
    where: list[str] | list[None] = [None]
    if config.cluster.distribute:
        if executor != "slurm":
            raise UserError("cluster.distribute needs SLURM; use cluster=slurm, or leave it out")
        most = submit.shards_per_job(config.cluster, executor)
        where, left_out = distribute.nodes(config.cluster)
        if config.dry_run != SCRIPT:  # which prints nothing but the script
            for line in left_out:
                console.print(f"Note: {line}.", soft_wrap=True)
            console.print(f"The same cases on each of {len(where)} nodes: {', '.join(where)}.", soft_wrap=True)
    shards = cases.split(plan, config, most)
    if config.dry_run == SCRIPT:
        jobs = -(-len(shards) // submit.shards_per_job(config.cluster, executor))
        print(_script(config, extra, jobs, where[0]), end="")
        return 0
    if config.dry_run:
        preflight.before_submitting(config.cluster, config.container, executor)
        print_plan(console, config, plan, shards, executor, device)
        return 0

    results = _writable(Path(config.results).absolute())
    if not shell.outlives(results):
        console.print(
            f"Note: {results} is on no mount, and its rows go with the container; to keep them, add "
            '-v "$PWD/results:/workspace/results" to docker run.',
            soft_wrap=True,
        )
    folder = _new_run(config, extra)
    name = folder.name
    commit = commit_of_sources()
    paths = [
        Shard(
            name=f"{index:04d}",
            run=name,
            folder=str(folder),
            results=config.results,
            device=device,
            cases=part,
            timing=named(config.timing),
            case_timeout_s=config.case_timeout_s,
            build_timeout_s=config.build_timeout_s,
            resume=config.resume,
            untrusted=config.untrusted,
            profilers=config.profiler.chosen(),
            extra=extra,
            commit=commit,
            sources=outside(extra, part),
            node=node,
        ).save()
        for index, (node, part) in enumerate(itertools.product(where, shards))
    ]

    try:
        with record.submitting(folder):
            submit.submit(paths, config.cluster, config.container, folder)
    except UserError:
        if not record.submitted(folder):  # nothing runs that would write there
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if executor == "slurm" and (models := preflight.models(config.cluster)):
        console.print(
            f"Note: jobs may get a GPU of any of these models: {', '.join(models)}; choose one with "
            f"cluster.gres=gpu:{models[0]}:1.",
            soft_wrap=True,
        )
    if not config.wait:
        console.print(
            f"Submitted {len(paths)} shards of {len(plan.cases)} cases as {name}. {look(folder)}", soft_wrap=True
        )
        return 0
    return finish(console, config, folder, plan)


def _new_run(config: Config, extra: list[str]) -> Path:
    """The folder of a new run, with its request, whose paths are the same from any folder. Raises UserError."""
    folder = _writable(Path(config.runs).absolute() / run_id())
    config.results, config.runs, config.extra = str(Path(config.results).absolute()), str(folder.parent), extra
    (folder / record.CONFIG).write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    return folder


def _script(config: Config, extra: list[str], jobs: int, where: str | None) -> str:
    """The script of a run's jobs. The run's folder, which it names, is gone when this returns. Raises UserError."""
    folder = _new_run(config, extra)
    try:
        return submit.script(jobs, config.cluster, config.container, folder, where)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def finish(console: Console, config: Config, folder: Path, plan: cases.Plan) -> int:
    """Follow the jobs of a run to their end and show what came of it; the exit status: 1 when cases got no row."""
    results = Path(config.results).absolute()
    progress = RunProgress(folder)
    known: set[str] = set()  # failed shards that are left as they are
    try:
        while True:
            follow(console, progress, known)
            failed = set(progress.failed) - known
            known |= failed
            if again := retries.due(progress, sorted(failed), config.cluster):
                try:
                    with record.submitting(folder):
                        submit_again(console, folder, config, again)
                    known -= {name for each in again for name in each.names}
                except UserError as error:  # the other jobs go on
                    console.print(f"Note: {error}.", soft_wrap=True)
                progress = RunProgress(folder)
            elif not progress.active:
                break
    except KeyboardInterrupt:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave jobs behind
        try:
            console.print("Ending the jobs.")
            queue.cancel(folder, list(progress.jobs.values()))
            progress.read_once()
            print_summary(console, results, folder.name, plan, progress)
            console.print(f"Stopped; finished rows are kept. To go on: {resubmit(folder)}", soft_wrap=True)
        finally:
            signal.signal(signal.SIGINT, handler)
        return 130
    complete = print_summary(console, results, folder.name, plan, progress)
    if not complete:
        console.print(f"Cases are missing; logs: {relative(folder)}. To run them: {resubmit(folder)}", soft_wrap=True)
    if config.notify and (problem := notify.notify(config.notify, progress)):
        console.print(f"Note: {problem}.", soft_wrap=True)
    return 0 if complete else 1


def submit_again(console: Console, folder: Path, config: Config, again: list[retries.Again]) -> None:
    """Submit shards as `retries` has planned, and say of each that gets more why. Whoever calls this has the lock of
    `record.submitting`. Raises UserError."""
    paths = record.shards(folder)
    for each in again:
        submit.submit([paths[name] for name in each.names], each.cluster, config.container, folder, each.retry)
        if each.said:
            console.print(f"Note: {each.said}.", soft_wrap=True)


def device_of(config: Config, executor: str, console: Console) -> tuple[str, tuple[int, int] | None, int]:
    """The kind of device that the jobs get; where it is this machine's, its compute capability and how many there are."""
    choose("device", config.device, ("auto", "cuda", "cpu"))
    if executor == "slurm":
        device = (
            config.device if config.device != "auto" else ("cuda" if preflight.gpus(config.cluster.gres) else "cpu")
        )
        return device, None, 1
    capability, gpus = (_local_gpu() if config.device != "cpu" else None) or (None, 1)
    if config.device == "cuda" and capability is None:
        raise UserError(f"device=cuda, and {NO_GPU}")
    if config.device == "auto" and capability is None:
        console.print(
            f"No CUDA GPU here{f' ({NO_GPU})' if IMAGE else ''}: running the CPU kernels over the CPU shapes."
        )
    return ("cuda", capability, gpus) if capability else ("cpu", None, 1)


def _local_gpu() -> tuple[tuple[int, int], int] | None:
    """The compute capability of the first visible GPU, and how many there are, found in a process of its own: this one
    takes no CUDA context.

    Raises UserError for a GPU whose driver is too old: `auto` must not pass it over."""
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists():
        return None
    probe = "import torch; print(*torch.cuda.get_device_capability(), torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    if why := driver_too_old(done.stderr):
        raise UserError(f"{why}; or use device=cpu")
    words = done.stdout.split()
    return ((int(words[0]), int(words[1])), int(words[2])) if len(words) == 3 else None


def _writable(folder: Path) -> Path:
    """Make a folder and prove that files can be written there, before any work is done."""
    probe = folder / f".minfer-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"minfer" * 1000)
        probe.unlink()
    except OSError as error:
        remedy = "free it or choose another with results=... or runs=..."
        if IMAGE and isinstance(error, PermissionError):
            remedy = 'run the container as its owner, with docker run --user "$(id -u):$(id -g)"'
        raise UserError(f"cannot write to {folder}: {error.strerror}; {remedy}") from error
    return folder


def run_id() -> str:
    """Unique and in order of time."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"


def commit_of_sources() -> str | None:
    """The commit of these sources, with + when the tree differs from it; where they are no clone, MINFER_COMMIT says it.

    A repository that they only lie in, as an environment may lie in a project's, is not theirs. None for a clone that git
    cannot read, as one mounted over the image's sources, of which MINFER_COMMIT is."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(CONF.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not INSTALLED and git("ls-files", "--full-name", "conf/config.yaml") == "conf/config.yaml":
            changed = git("status", "--porcelain", "--untracked-files=no")
            return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        pass
    clone = not INSTALLED and (CONF.parent / ".git").exists()
    return None if clone else os.environ.get("MINFER_COMMIT") or None


def look(folder: Path) -> str:
    """How to see from any shell what became of a run."""
    run = str(relative(folder))
    return f"To look: {shell.command('status', run)}; to end it: {shell.command('cancel', run)}"


def resubmit(folder: Path) -> str:
    """The command that runs what a run lacks."""
    if not shell.outlives(folder):
        return "the same command with resume=true (runs/ is not mounted, so this run's folder goes with the container)"
    return shell.command("resubmit", str(relative(folder)))
