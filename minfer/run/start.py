"""One run: plan the cases, submit the shards, follow them, show the table."""

from __future__ import annotations

import datetime
import itertools
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from minfer import ops
from minfer.bench.device import IMAGE
from minfer.jobs import executors, partition
from minfer.jobs.executors.base import Device, Executor
from minfer.jobs.queue import Seen
from minfer.jobs.run import Run
from minfer.ops import Case
from minfer.plan import cases, extra, shell
from minfer.plan.config import CONF, INSTALLED, SCRIPT, Config, MaybeQueued, NoAnswer, UserError, name_changes
from minfer.plan.shard import Shard, hash_outside
from minfer.rows.store import FAILED
from minfer.run import failures, notify, resumed, retries, terminal
from minfer.run.live import follow
from minfer.run.progress import RunProgress
from minfer.run.terminal import COLUMNS, count, print_found, print_plan, print_size, print_summary
from minfer.worker.resume import Found


class Stopped(UserError):
    """Ctrl-C came when jobs may have been started."""

    status = 130


@dataclass(frozen=True)
class Launch:
    """A planned request: its cases, split into shards. Each node runs all shards."""

    plan: cases.Plan
    device: str  # "cuda" or "cpu"
    shards: list[list[Case]]
    nodes: list[str] | list[None]  # None: SLURM chooses
    found: dict[str, Found]  # by the keys of cases: their rows that are there already (resume=true)


def run(config: Config) -> int:
    """Plan a request, run it, and show the results. Returns the exit status, `exit_status_of`.
    Raises UserError."""
    console = terminal.console()
    try:
        _load_extra(config)
        executor = executors.choose(config.cluster, config.container)
        if config.dry_run != SCRIPT:  # dry_run=script prints only the script
            print_notes(console, executor.list_set_aside())
        launch = _plan(console, config, executor)
        if config.dry_run:
            _show_plan(console, config, executor, launch)
            return 0
        if launch.found.keys() >= {case.key for case in launch.plan.cases}:
            return _show_found(console, launch)
        print_size(console, config, launch.plan, launch.shards)
        run = _submit(console, config, executor, launch)
    except KeyboardInterrupt:
        console.print("Stopped before anything was started.")
        raise
    return finish(console, run, executor, launch.plan) if config.wait else 0


def print_notes(console: Console, sentences: Iterable[str]) -> None:
    """Print sentences for the user, each as a note."""
    for sentence in sentences:
        console.print(f"Note: {sentence}.", soft_wrap=True)


def _load_extra(config: Config) -> None:
    """Make the paths of the user's files absolute, and import them. Raises UserError."""
    config.extra = [str(Path(path).absolute()) for path in config.extra]
    for path in config.extra:
        if not Path(path).is_file():
            raise UserError(f"extra={path} does not exist")
        extra.load(path)


def _plan(console: Console, config: Config, executor: Executor) -> Launch:
    """Plan a request for the device that its jobs get, and adapt its config to that device. Raises UserError."""
    device = executor.find_device(config.device)
    if device.note and config.dry_run != SCRIPT:
        console.print(device.note, soft_wrap=True)
    if device.kind == "cpu":
        config.cluster.gres = partition.drop_gpus(config.cluster.gres)
    config.profiler.resolve(device.kind)
    config.timing = config.timing.on(device.kind)
    plan = cases.plan(config, device.kind, device.capability)
    if device.kind == "cpu" and config.profiler.static:
        console.print("CUDA kernels are not timed here; profiler=static compiles them and reads their machine code.")
    for op, kernel in dict.fromkeys((case.op, case.kernel) for case in plan.cases):
        if not (source := ops.get(op).kernels[kernel].source).is_file():
            raise UserError(
                f"the source of kernel {kernel}, {source}, does not exist; write it or remove its registration"
            )
    if not executor.queued:
        plan.resources.clear()
    nodes: list[str] | list[None] = [None]
    if config.cluster.distribute:
        nodes, left_out = executor.choose_nodes()
        if config.dry_run != SCRIPT:
            print_notes(console, left_out)
            console.print(f"The same cases on each of {len(nodes)} nodes: {', '.join(nodes)}.", soft_wrap=True)
    if (why := _explain_too_large(plan, device)) and config.dry_run != SCRIPT:
        print_notes(console, [why])
    found = resumed.find(config, device, plan.cases)
    plan.found.update(found)
    return Launch(plan, device.kind, cases.split(plan, config, executor.count_shards(device)), nodes, found)


def _explain_too_large(plan: cases.Plan, device: Device) -> str:
    """Which cases have more tensors than the device has memory, in a sentence; empty if none has, or the memory is unknown."""
    if math.isinf(device.memory):
        return ""
    sizes: dict[tuple[str, str], int] = {}
    for case in plan.cases:
        if case.key not in plan.unsupported and (case.op, case.problem) not in sizes:
            with suppress(Exception):  # a user's op may fail at some shape: its row will say
                sizes[case.op, case.problem] = ops.get(case.op).operand_bytes(case)
    if not (large := {problem: size for problem, size in sizes.items() if size > device.memory}):
        return ""
    (op, problem), size = max(large.items(), key=lambda item: item[1])
    return (
        f"{len(large)} of {len(sizes)} problems do not fit in the memory of {device.memory / 1e9:,.0f} GB, and their cases will"
        f" run out of memory: the tensors of {op} {problem} take {size / 1e9:,.0f} GB"
    )


def _show_found(console: Console, launch: Launch) -> int:
    """Show the rows of a request of which nothing is missing; no run is created. Returns the exit status."""
    print_found(console, *resumed.load(launch.found.values(), COLUMNS))
    return 4 if any(row.status in FAILED for row in launch.found.values()) else 0


def _show_plan(console: Console, config: Config, executor: Executor, launch: Launch) -> None:
    """Print what `dry_run` asks for: the plan, or the script of the jobs. Raises UserError."""
    groups = [
        (own, list(shards))
        for own, shards in itertools.groupby(launch.shards, lambda shard: launch.plan.resources.get(shard[0].key, {}))
    ]
    if config.dry_run != SCRIPT:
        for own, _ in groups:
            executor.with_resources(own).preflight()
        print_plan(console, config, launch.plan, launch.shards, executor.name, launch.device)
        return
    run = _create_run(config)
    try:
        for own, shards in groups:
            asking = executor.with_resources(own)
            print(asking.script(run, -(-len(shards) // asking.shards_per_job), launch.nodes[0]), end="")
    finally:
        shutil.rmtree(run.folder, ignore_errors=True)


def _submit(console: Console, config: Config, executor: Executor, launch: Launch) -> Run:
    """Create a new run, submit its jobs, and print notes for the user. Raises UserError."""
    results = _make_writable(Path(config.results).absolute())
    if not shell.outlives(results):
        console.print(
            f"Note: {results} is on no mount, and its rows go with the container; to keep them, add "
            '-v "$PWD/results:/workspace/results" to docker run.',
            soft_wrap=True,
        )
    run = _create_run(config)
    try:
        shards = _write_shards(run, launch)
        with run.lock():
            executor.submit(run, shards)
    except (UserError, OSError, KeyboardInterrupt) as error:
        lost: dict[str, Seen] | None = None
        if not run.all_jobs and not run.cancelled and not isinstance(error, MaybeQueued):
            # another NoAnswer comes before anything is submitted
            lost = {} if isinstance(error, NoAnswer) else executors.find_states(run, [])
        if lost == {}:  # no job was submitted that would write there
            shutil.rmtree(run.folder, ignore_errors=True)
        elif isinstance(error, KeyboardInterrupt):
            raise Stopped(f"stopped while jobs were being submitted. {look_commands(run)}") from error
        if lost and isinstance(error, OSError):
            raise UserError(
                f"{len(lost)} jobs are queued as {run.name}, and their ids cannot be written to {run.folder}: "
                f"{error.strerror}; free space there. {look_commands(run)}"
            ) from error
        raise
    if models := executor.list_models():
        console.print(
            f"Note: jobs may get a GPU of any of these models: {', '.join(models)}; choose one with "
            f"cluster.gres=gpu:{models[0]}:1.",
            soft_wrap=True,
        )
    if not config.wait:
        console.print(
            f"Submitted {count(len(shards), 'shard')} of {len(launch.plan.cases)} cases as {run.name}. {look_commands(run)}",
            soft_wrap=True,
        )
    return run


def _create_run(config: Config) -> Run:
    """Create a run, with absolute paths in its request. Raises UserError."""
    folder = _make_writable(Path(config.runs).absolute() / make_run_id())
    config.results, config.runs = str(Path(config.results).absolute()), str(folder.parent)
    return Run.create(folder, config)


def _write_shards(run: Run, launch: Launch) -> list[str]:
    """Write the file of each shard. Returns the names of the shards."""
    config, commit = run.request, commit_of_sources()
    timing = name_changes(config.timing)
    names = []
    for index, (node, part) in enumerate(itertools.product(launch.nodes, launch.shards)):
        shard = Shard(
            name=f"{index:04d}",
            run=run.name,
            folder=str(run.folder),
            results=config.results,
            device=launch.device,
            cases=part,
            timing=timing,
            case_timeout_s=config.case_timeout_s,
            build_timeout_s=config.build_timeout_s,
            drawn=config.draw.seed if config.draw.problems else None,
            resume=config.resume,
            untrusted=config.untrusted,
            beside=config.beside,
            profilers=config.list_profilers(),
            extra=config.extra,
            commit=commit,
            sources=hash_outside(config.extra, part),
            node=node,
            resources=launch.plan.resources.get(part[0].key, {}),
        )
        shard.save()
        names.append(shard.name)
    return names


def finish(console: Console, run: Run, executor: Executor, plan: cases.Plan) -> int:
    """Follow the jobs of a run to their end and show what came of it. Returns the exit status, `exit_status_of`."""
    progress = RunProgress(run)
    known: set[str] = set()  # failed shards that are left as they are
    try:
        while True:
            follow(console, progress, known)
            failed = set(progress.failed) - known
            known |= failed
            if run.cancelled:
                if not progress.active:
                    break
            elif again := retries.plan_due(progress, sorted(failed), failures.avoid(progress, executor)):
                try:
                    with run.lock():
                        submit_again(console, run, again)
                    known -= {name for each in again for name in each.names}
                except UserError as error:  # the other jobs go on
                    console.print(f"Note: {error}.", soft_wrap=True)
                progress = RunProgress(run)
            elif not progress.active:
                break
    except KeyboardInterrupt:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave jobs behind
        try:
            console.print("Ending the jobs.")
            print_notes(console, executors.cancel(run, progress.jobs.values(), progress.lost))
            progress.read_once()
            if print_summary(console, progress, plan):
                console.print("Stopped; every case has its row.")
            else:
                console.print(f"Stopped; finished rows are kept. To go on: {resubmit_command(run)}", soft_wrap=True)
        finally:
            signal.signal(signal.SIGINT, handler)
        return 130
    complete = print_summary(console, progress, plan)
    if not complete:
        logs = shell.relative(run.folder)
        console.print(f"Cases are missing; logs: {logs}. To run them: {resubmit_command(run)}", soft_wrap=True)
    target = run.request.notify
    if target and (problem := notify.notify(target, progress)):
        console.print(f"Note: {problem}.", soft_wrap=True)
    return exit_status_of(progress, complete)


def exit_status_of(progress: RunProgress, complete: bool) -> int:
    """The exit status of a run that has ended: 1 when cases have no row, 4 when a kernel failed in a row, else 0. Rows of other
    runs count where a case was not run again (resume=true)."""
    if not complete:
        return 1
    statuses = [row["status"] for row in progress.run.rows(["status"]).values()]
    return 4 if any(status in FAILED for status in (*statuses, *progress.skipped.values())) else 0


def submit_again(console: Console, run: Run, again: Iterable[retries.Again]) -> None:
    """Submit shards as `retries` has planned, and print why limits are raised. The caller must hold the run's lock. Raises
    UserError."""
    for each in again:
        each.executor.submit(run, each.names, each.retry)
        if each.why:
            console.print(f"Note: {each.why}.", soft_wrap=True)


def _make_writable(folder: Path) -> Path:
    """Make a folder and check that files can be written there, before any work is done."""
    probe = folder / f".minfer-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"minfer" * 1000)
        probe.unlink()
    except (FileExistsError, NotADirectoryError) as error:
        file = next(path for path in (folder, *folder.parents) if path.exists())
        raise UserError(f"{file} is no folder; choose another with results=... or runs=...") from error
    except OSError as error:
        remedy = "free it or choose another with results=... or runs=..."
        if IMAGE and isinstance(error, PermissionError):
            remedy = 'run the container as its owner, with docker run --user "$(id -u):$(id -g)"'
        raise UserError(f"cannot write to {folder}: {error.strerror}; {remedy}") from error
    return folder


def make_run_id() -> str:
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


def look_commands(run: Run) -> str:
    """How to see from any shell what became of a run."""
    name = str(shell.relative(run.folder))
    return f"To look: {shell.command('status', name)}; to end it: {shell.command('cancel', name)}"


def resubmit_command(run: Run) -> str:
    """The command that runs what a run lacks."""
    if not shell.outlives(run.folder):
        return "the same command with resume=true (runs/ is not mounted, so this run's folder goes with the container)"
    return shell.command("resubmit", str(shell.relative(run.folder)))
