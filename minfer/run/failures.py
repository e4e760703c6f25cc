"""Groups the shards whose jobs failed by node and cause, and lets new jobs leave out a node on which every job failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minfer.jobs.executors.base import Executor
from minfer.run.progress import CANCELLED, RunProgress

NAMED = 8  # shards that a sentence names


@dataclass(frozen=True)
class Failure:
    """Shards whose jobs failed or were cancelled on one node, for one cause."""

    node: str | None  # None if unknown
    cause: str
    shards: tuple[str, ...]
    log: Path | None  # of the first shard, if it may say more


def collect(progress: RunProgress) -> list[Failure]:
    """The failures of a run; the most frequent first."""
    causes = progress.causes()
    groups: dict[tuple[str | None, str], list[str]] = {}
    for name, (cause, _) in causes.items():
        shard = progress.shards[name]
        groups.setdefault((shard.node or shard.pinned, cause), []).append(name)
    found = [Failure(node, cause, tuple(names), causes[names[0]][1]) for (node, cause), names in groups.items()]
    return sorted(found, key=lambda failure: -len(failure.shards))


def describe(failure: Failure, reasons: dict[str, str]) -> str:
    """A failure in a sentence. For a single shard the sentence has the shard's own reason, which names its job."""
    where = f" on {failure.node}" if failure.node else ""
    names = name_shards(failure.shards)
    if failure.cause == CANCELLED:
        return f"{names[0].upper()}{names[1:]}{where} {'was' if len(failure.shards) == 1 else 'were'} cancelled."
    if len(failure.shards) == 1:
        return f"Shard {failure.shards[0]}{where} failed: {reasons[failure.shards[0]]}."
    more = f"; see {failure.log}" if failure.log else ""
    return f"{names}{where} failed: {failure.cause}{more}."


def name_shards(names: Sequence[str]) -> str:
    """`3 shards (0000, 0001, 0002)`."""
    if len(names) == 1:
        return f"shard {names[0]}"
    return f"{len(names)} shards ({', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''})"


def avoid(progress: RunProgress, executor: Executor) -> Executor:
    """An executor like this one; with `cluster.avoid=auto`, its jobs leave out the nodes on which every job failed."""
    cluster = executor.cluster
    if cluster.avoid is None or cluster.distribute or not (bad := progress.find_bad_nodes()):
        return executor
    names = [str(cluster.flags["exclude"])] if cluster.flags.get("exclude") else []
    flags = cluster.flags | {"exclude": ",".join([*names, *bad])}
    return replace(executor, cluster=replace(cluster, flags=flags))
