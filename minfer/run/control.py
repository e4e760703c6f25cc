"""What can be done to a run that was submitted earlier, from any shell; `minfer.cli` has the commands."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from jobs import queue, record, submit
from minfer.plan.cases import Plan
from minfer.plan.config import UserError
from minfer.run import start
from minfer.run.progress import RunProgress
from minfer.run.report import print_summary


def status(console: Console, folder: Path, words: list[str]) -> int:
    """How far it is, and what came of it; 1 when cases are missing that no job will run."""
    config = record.request(folder, words)
    progress = RunProgress(folder)
    progress.read_once()
    # What no job has come to yet, is not reported as left out: the request's plan was shown when it was submitted.
    complete = print_summary(
        console, Path(config.results).absolute(), folder.name, Plan(progress.cases, {}, {}), progress
    )
    console.print(f"{folder.name}: {progress.line()}.", soft_wrap=True)
    for warning in progress.warnings():
        console.print(f"Note: {warning}.", soft_wrap=True)
    if complete or progress.active or not progress.answers:
        return 0
    console.print(f"Cases are missing; to run them: {start.resubmit(folder)}", soft_wrap=True)
    return 1


def cancel(console: Console, folder: Path, words: list[str]) -> int:
    """End its jobs; finished rows are kept."""
    record.request(folder, words)
    progress = RunProgress(folder)
    progress.read_once()
    if not progress.answers:
        raise UserError("SLURM does not answer, so that nothing can be cancelled; try again")
    jobs = list({job.id: job for job in record.submitted(folder)}.values())  # a job of several GPUs has as many shards
    there = queue.states(folder, jobs) or {}
    queue.cancel(folder, jobs)  # all that were ever submitted: one that is held may have nothing left to do
    jobs = [job for job in jobs if job.id in there]
    console.print(
        f"{folder.name}: {len(jobs)} jobs cancelled; its {progress.rows} rows are kept."
        + (f" To go on: {start.resubmit(folder)}" if jobs else ""),
        soft_wrap=True,
    )
    return 0


def resubmit(console: Console, folder: Path, words: list[str]) -> int:
    """Submit again what no job will finish; `words` may change cluster.* and container.*, or say wait=false."""
    config = record.request(folder, [word for word in words if word != "wait=false"])
    config.wait = "wait=false" not in words
    with record.submitting(folder):
        progress = RunProgress(folder)
        progress.read_once()
        if not progress.answers:
            raise UserError("SLURM does not answer, so that nobody knows which jobs still run; try again")
        paths = [record.shards(folder)[name] for name in progress.missing]
        if not paths:
            console.print(f"{folder.name}: nothing to submit; {progress.line()}.", soft_wrap=True)
            return 0
        submit.submit(paths, config.cluster, config.container, folder)
    console.print(f"{folder.name}: {len(paths)} shards submitted again. {start.look(folder)}", soft_wrap=True)
    return start.finish(console, config, folder, Plan(progress.cases, {}, {})) if config.wait else 0
