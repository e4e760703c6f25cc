"""Shards that are submitted again, with more time or memory where their job ended at its limit (`cluster.retries`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from minfer.jobs import executors, logs
from minfer.jobs.executors.base import Executor
from minfer.jobs.run import Job
from minfer.run import failures
from minfer.run.progress import RunProgress, ShardProgress

FACTOR = 2  # by so much a job asks for more
LIMITS = {
    "time_min": ("reached its time limit of {} min", "min"),
    "memory_gb": ("ran out of its {} GB of memory", "GB"),
}


@dataclass(frozen=True)
class Again:
    """Shards to submit again, and the executor for them, whose `cluster` has what their jobs ask for."""

    names: tuple[str, ...]
    executor: Executor
    retry: int  # how often the limits of their jobs have been raised
    why: str  # a sentence on why their limits are raised; empty if they are not


def plan(progress: RunProgress, names: Sequence[str], executor: Executor) -> list[Again]:
    """Plan how to submit shards again that have no job left. A job that ended at its time or memory limit asks for FACTOR
    times as much, at most `cluster.retries` times and at most what a node has. Raised limits stay raised."""
    if not names:
        return []
    cluster = executor.cluster
    ends = executors.find_ends([job for name in names if (job := progress.jobs.get(name))])
    most = functools.cache(lambda gres: executor.with_resources({"gres": gres}).find_most())
    found: dict[tuple[int, str, str], tuple[list[str], Executor]] = {}
    for name in names:
        job = progress.jobs.get(name)
        asked, retry, why = executor.with_resources(progress.run.choose_resources(name)).cluster, 0, ""
        if job is not None:
            retry = job.retry
            if retry:
                asked = replace(asked, time_min=job.time_min, memory_gb=job.memory_gb)
            key = find_limit(progress, progress.shards[name], job, ends.get(job.id, ""))
            now: int | None = getattr(asked, key) if key else None
            if (
                key
                and now is not None
                and retry < cluster.retries
                and (more := min(FACTOR * now, most(asked.gres)[key])) > now
            ):
                changed: dict[str, Any] = {key: int(more)}
                asked, retry = replace(asked, **changed), retry + 1
                ended, unit = LIMITS[key]
                why = f"{ended.format(now)}, and is submitted again with {int(more)} {unit}"
                why += f" (retry {retry} of {cluster.retries})"
        found.setdefault((retry, why, repr(asked)), ([], replace(executor, cluster=asked)))[0].append(name)
    return [
        Again(
            tuple(of),
            asking,
            retry,
            f"{'each of ' if len(of) > 1 else ''}{failures.name_shards(of)} {why}" if why else "",
        )
        for (retry, why, _), (of, asking) in found.items()
    ]


def plan_due(progress: RunProgress, names: Sequence[str], executor: Executor) -> list[Again]:
    """The shards to submit again without a request of the user: those whose limits are raised, and those whose job stopped
    before its time limit and could not be queued again by its script."""
    stopped = [name for name in names if progress.shards[name].again]
    others = [name for name in names if name in progress.missing and name not in stopped]
    return plan(progress, stopped, executor) + [each for each in plan(progress, others, executor) if each.why]


def find_limit(progress: RunProgress, shard: ShardProgress, job: Job, end: str) -> str | None:
    """The key of `cluster` that says how much a job may have of what it needed more of, where it ended for that; `end` is
    SLURM's word for its end."""
    if shard.again or not executors.EXECUTORS[job.executor].queued:
        return None
    if shard.limit or shard.message:
        return shard.limit
    return logs.find_limit(progress.run.log(job), end)
