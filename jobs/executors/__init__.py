"""Chooses the executor of a request, and asks all executors about a run's jobs. Each executor wraps one of submitit's."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator

from minfer.jobs.executors.base import Executor
from minfer.jobs.executors.local import Local
from minfer.jobs.executors.slurm import Slurm
from minfer.jobs.queue import Account, Seen
from minfer.jobs.run import Job, Run
from minfer.plan.config import Cluster, Container, UserError

EXECUTORS: dict[str, type[Executor]] = {form.name: form for form in (Local, Slurm)}


def choose(cluster: Cluster, container: Container) -> Executor:
    """The executor of a request. Raises UserError if it needs SLURM and there is none."""
    found = shutil.which("sbatch") is not None
    name = (Slurm.name if found else Local.name) if cluster.executor == "auto" else cluster.executor
    if name not in EXECUTORS:
        raise UserError(f"cluster.executor is {name!r}; it can be auto, local or slurm")
    if name == Slurm.name and not found:
        raise UserError(
            f"cluster={cluster.name} needs SLURM, and sbatch is not on the PATH; use a login node or cluster=local"
        )
    return EXECUTORS[name](cluster, container)


def find_states(run: Run, jobs: Collection[Job]) -> dict[str, Seen] | None:
    """The queue's entry for each job of a run that has not ended, by its id, also if the job is not among `jobs`. None if
    SLURM does not answer, or hides the jobs from this user."""
    found: dict[str, Seen] = {}
    for form, own in list(_by_form(jobs)) or [(form, []) for form in _find_form(run)]:
        if (told := form.states(run, own)) is None:
            return None
        found |= told
    return found


def find_accounts(jobs: Collection[Job]) -> dict[str, Account]:
    """The accounting record of each job, by its id."""
    return {job: account for form, own in _by_form(jobs) for job, account in form.accounts(own).items()}


def find_ends(jobs: Collection[Job]) -> dict[str, str]:
    """How jobs ended, by id, as SLURM's state such as TIMEOUT; empty without accounting."""
    return {job: account.state for job, account in find_accounts(jobs).items()}


def cancel(run: Run, jobs: Collection[Job], lost: Collection[str] = ()) -> list[str]:
    """Cancel jobs of a run. `lost`: the ids of further jobs, which the queue has and the run's folder does not name. Returns
    a sentence for each job that could not be cancelled."""
    ids = {form: [job.id for job in own] for form, own in _by_form(jobs)}
    if lost:
        ids[Slurm] = [*ids.get(Slurm, []), *lost]
    # local jobs last, because their cancel waits for their end
    return [line for form in reversed(EXECUTORS.values()) if form in ids for line in form.cancel(run, ids[form])]


def _find_form(run: Run) -> list[type[Executor]]:
    """The executor of a run whose folder names no job; empty if its request does not tell."""
    try:
        return [type(choose(run.request.cluster, run.request.container))]
    except (UserError, OSError):
        return []


def _by_form(jobs: Collection[Job]) -> Iterator[tuple[type[Executor], list[Job]]]:
    for name, form in EXECUTORS.items():
        if own := [job for job in jobs if job.executor == name]:
            yield form, own
