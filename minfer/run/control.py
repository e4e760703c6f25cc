"""What can be done to a run that was submitted earlier, from any shell; `minfer.cli` has the commands."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from minfer.jobs import executors
from minfer.jobs.run import Run
from minfer.plan.cases import Plan
from minfer.plan.config import NoAnswer, UserError
from minfer.plan.shard import Shard
from minfer.rows.store import FAILED, STATUSES
from minfer.run import by_node, failures, junit, retries, start, usage
from minfer.run.live import follow
from minfer.run.progress import RunProgress
from minfer.run.terminal import count, print_summary

JSON, JUNIT, STATUS = "--json", "--junit=", "status="
SHOWN = 20  # runs of a list
LOCK_S = 60.0  # how long another process may take to stop submitting
CHUNK = 1 << 16  # characters of a log that are read at a time: it may be larger than the memory


def runs(console: Console, words: list[str]) -> int:
    """The newest runs below `runs`, one a line: its age, its rows, its shards. With --json: the same as JSON."""
    if other := [word for word in words if word != JSON]:
        raise UserError(f"cannot read {other[0]!r}; usage: minfer runs [{JSON}]")
    found = []
    for run in Run.list_all()[-SHOWN:]:
        progress = RunProgress(run)
        progress.glance()
        found.append(describe(progress))
    if JSON in words:
        print(json.dumps(found, indent=1))
        return 0
    table = Table(
        "run",
        "age",
        "rows",
        "shards",
        title=f"{len(found)} run{'s' * (len(found) != 1)}, the newest last",
        title_justify="left",
    )
    for about in found:
        rows = f"{about['rows']} of {about['cases']}"
        table.add_row(about["run"], _format_age(about["age_s"]), rows, _format_counts(about["shards"]))
    console.print(table if found else "There are no runs below the folder runs; minfer +sweep=... starts one.")
    return 0


def describe(progress: RunProgress) -> dict[str, Any]:
    """What is known of a run, for other programs: its cases and rows, how many shards are in which state, why jobs wait or
    ended early."""
    run = progress.run
    return {
        "run": run.name,
        "folder": str(run.folder),
        "age_s": round(run.age_s),
        "cases": len(progress.cases),
        "rows": progress.rows,
        "shards": progress.counts(),
        "slurm": _describe_slurm(progress),
        "jobs": sorted({job.id for job in progress.jobs.values()} | progress.lost.keys()),
        "warnings": progress.warnings(),
        "failed": progress.reasons(),
        "failures": [
            {"node": each.node, "cause": each.cause, "shards": list(each.shards)} for each in failures.collect(progress)
        ],
    }


def _describe_slurm(progress: RunProgress) -> str | None:
    if not progress.queued:
        return None
    return "answers" if progress.answers else "hides jobs" if progress.hidden else "no answer"


def _format_age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _format_counts(shards: dict[str, int]) -> str:
    return ", ".join(f"{n} {state}" for state, n in shards.items())


def logs(console: Console, run: Run, words: list[str]) -> int:
    """What a shard's job and its processes wrote; without a shard, where the logs of each are."""
    progress = RunProgress(run)
    if not words:
        for name in progress.shards:
            for path in _find_logs(progress, name):
                console.print(f"{name}: {path}", soft_wrap=True)
        return 0
    name = words[0].zfill(4)  # a plan calls shard 0000 just 0
    if len(words) > 1:
        raise UserError(f"cannot read {words[1]!r}; usage: minfer logs RUN [SHARD]")
    if name not in progress.shards:
        raise UserError(f"{run.name} has no shard {words[0]}; it has {', '.join(list(progress.shards)[:8])}")
    for path in _find_logs(progress, name):
        print(f"==> {path} <==")
        with open(path, errors="replace") as file:
            while text := file.read(CHUNK):
                print("".join(c for c in text if c.isprintable() or c in "\n\t"), end="")
        print()
    return 0


def _find_logs(progress: RunProgress, shard: str) -> list[Path]:
    job, run = progress.jobs.get(shard), progress.run
    of_job = [run.log(job, stream) for stream in ("out", "err")] if job else []
    return [path for path in (*of_job, run.folder / "logs" / f"{shard}.log") if path.exists() and path.stat().st_size]


def status(console: Console, run: Run, words: list[str]) -> int:
    """Show a run's progress and its results. Returns 1 if cases are missing that no job will run, and 3 if that is unknown
    because SLURM does not answer. --json prints the same as JSON; --junit=FILE writes the cases as JUnit's XML."""
    run.change_request([word for word in words if word != JSON and not word.startswith(JUNIT)])
    progress = RunProgress(run)
    progress.read_once()
    _write_junit(progress, words)
    if JSON in words:
        used = {"usage": usage.to_json(usage.collect(progress))}
        if nodes := [shard.pinned for shard in progress.shards.values() if shard.pinned]:
            found = run.rows(by_node.COLUMNS)
            used["nodes"] = [asdict(each) for each in by_node.compare(found.values(), nodes)]
        print(json.dumps(describe(progress) | used, indent=1))
        if progress.active and not progress.answers:
            return NoAnswer.status
        return int(not progress.active and bool(progress.missing))
    # What no job has come to yet, is not reported as left out: the request's plan was shown when it was submitted.
    complete = print_summary(console, progress, Plan(progress.cases, {}, {}))
    console.print(usage.tabulate(usage.collect(progress)), soft_wrap=True)
    console.print(f"{run.name}: {progress.line()}.", soft_wrap=True)
    for warning in progress.warnings():
        console.print(f"Note: {warning}.", soft_wrap=True)
    if progress.active and not progress.answers:
        return NoAnswer.status
    if complete or progress.active:
        return 0
    console.print(f"Cases are missing; to run them: {start.resubmit_command(run)}", soft_wrap=True)
    return 1


def wait(console: Console, run: Run, words: list[str]) -> int:
    """Follow a run's jobs to their end and show the results. Returns the exit status, `start.exit_status_of`. It also follows
    jobs that another launcher submits again. Ctrl-C leaves the jobs alone."""
    if other := [word for word in words if not word.startswith(JUNIT)]:
        raise UserError(f"cannot read {other[0]!r}; usage: minfer wait RUN [{JUNIT}FILE]")
    progress = RunProgress(run)
    try:
        while True:
            follow(console, progress, progress.shards)
            progress = RunProgress(run)
            progress.read_once()
            if not progress.active:
                break
    except KeyboardInterrupt:
        console.print(f"The jobs of {run.name} go on. {start.look_commands(run)}", soft_wrap=True)
        return 130
    complete = print_summary(console, progress, Plan(progress.cases, {}, {}))
    _write_junit(progress, words)
    if not complete:
        console.print(f"Cases are missing; to run them: {start.resubmit_command(run)}", soft_wrap=True)
    return start.exit_status_of(progress, complete)


def _write_junit(progress: RunProgress, words: list[str]) -> None:
    """Write the run as JUnit's XML if `words` has --junit=FILE. Raises UserError if it cannot be written."""
    for path in [Path(word.removeprefix(JUNIT)) for word in words if word.startswith(JUNIT)]:
        try:
            path.write_bytes(junit.to_xml(progress))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; name another file with {JUNIT}") from error


def cancel(console: Console, run: Run, words: list[str]) -> int:
    """End its jobs; finished rows are kept. The request is not read: jobs must end also where its file is broken."""
    if words:
        raise UserError(f"cannot read {words[0]!r}; usage: minfer cancel RUN")
    with contextlib.suppress(OSError):  # a full disk
        run.mark_cancelled(True)  # makes another process that is submitting its jobs stop and release the lock
    with run.lock(LOCK_S):
        progress = RunProgress(run)
        progress.read_once()
        jobs = list({job.id: job for job in run.all_jobs}.values())  # a job of several GPUs has as many shards
        there = executors.find_states(run, jobs) if progress.answers else None
        if there is None:
            raise NoAnswer("SLURM does not answer, so that nothing can be cancelled; try again")
        # all jobs that were ever submitted: a job that is held may have no case left to run
        refused = executors.cancel(run, jobs, there.keys() - {job.id for job in jobs})
        if not refused:
            with contextlib.suppress(OSError):
                run.tell([shard.name for shard in progress.active], event="cancelled")
    if refused:
        done = len(there) - len(refused)
        raise UserError(
            f"{done} of {len(there)} jobs of {run.name} were cancelled; scancel says of the others: {refused[0]}"
        )
    console.print(
        f"{run.name}: {len(there)} jobs cancelled; its {progress.rows} rows are kept."
        + (f" To go on: {start.resubmit_command(run)}" if there else ""),
        soft_wrap=True,
    )
    return 0


def resubmit(console: Console, run: Run, words: list[str]) -> int:
    """Submit again what no job will finish, and with status=timeout,oom the cases whose rows say that; other words may change
    cluster.* and container.*, or say wait=false."""
    statuses = [
        status for word in words if word.startswith(STATUS) for status in _parse_statuses(word.removeprefix(STATUS))
    ]
    if any(word.startswith("cluster.distribute") for word in words):
        raise UserError("cluster.distribute cannot be changed of a run; start a new one")
    changes = [word for word in words if word != "wait=false" and not word.startswith(STATUS)]
    if other := [word for word in changes if not word.lstrip("+").startswith(("cluster.", "container."))]:
        raise UserError(
            f"cannot resubmit with {other[0]!r}; only cluster.KEY=VALUE, container.KEY=VALUE, {STATUS}... and wait=false can"
            " be given"
        )
    run.change_request(changes)
    with run.lock():
        progress = RunProgress(run)
        progress.read_once()
        if not progress.answers:
            raise NoAnswer("SLURM does not answer, so that nobody knows which jobs still run; try again")
        if statuses:
            _redo(console, progress, statuses)
        missing = progress.missing
        if not missing:
            console.print(f"{run.name}: nothing to submit; {progress.line()}.", soft_wrap=True)
            return 0
        executor = executors.choose(run.request.cluster, run.request.container)
        start.print_notes(console, executor.list_set_aside())
        executor = failures.avoid(progress, executor)
        if any(word.startswith(("cluster.time_min=", "cluster.memory_gb=")) for word in words):
            again = [retries.Again(tuple(missing), executor, 0, "")]
        else:
            again = retries.plan(progress, missing, executor)
        run.mark_cancelled(False)
        start.submit_again(console, run, again)
    console.print(
        f"{run.name}: {count(len(missing), 'shard')} submitted again. {start.look_commands(run)}", soft_wrap=True
    )
    if "wait=false" in words:
        return 0
    return start.finish(console, run, executor, Plan(progress.cases, {}, {}))


def _parse_statuses(text: str) -> list[str]:
    """The statuses of a list such as `timeout,oom`; `failed` means all statuses of failed kernels. Raises UserError."""
    chosen = [status for word in text.strip("[]").split(",") for status in (FAILED if word == "failed" else (word,))]
    for status in chosen:
        if status not in STATUSES:
            raise UserError(f"unknown status {status!r}; it can be {', '.join(STATUSES)}, or failed")
    return chosen


def _redo(console: Console, progress: RunProgress, statuses: list[str]) -> None:
    """Have the cases whose newest rows have one of these statuses done again, where no job has their shard: their shards
    are missing from now on."""
    again: dict[str, dict[str, float]] = {}
    for (name, case), row in progress.run.rows(["status"]).items():
        if row["status"] in statuses and name in progress.shards:
            again.setdefault(name, {})[case] = row["finished"].timestamp()
    active = {shard.name for shard in progress.active}
    if left := sum(len(cases) for name, cases in again.items() if name in active):
        console.print(f"{left} such cases are left as they are, because the jobs of their shards wait or run.")
    files = progress.run.shards
    for name in again.keys() - active:
        shard = Shard.load(files[name])
        shard.redo |= again[name]
        shard.save()
        progress.run.tell([name], event="redo", cases=list(again[name]))
    count = sum(len(cases) for name, cases in again.items() if name not in active)
    console.print(f"{count} cases with the status {' or '.join(statuses)} are to be done again.")
    progress.read_once()
