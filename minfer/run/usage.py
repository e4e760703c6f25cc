"""How long the job of each shard waited and ran, and how much memory it took: what SLURM's accounting says, and where there is
none, what the shard's own process recorded."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from minfer.jobs import executors
from minfer.jobs.queue import Account
from minfer.run.progress import RunProgress, ShardProgress

LINES = 20  # shards that are shown one by one; of more only the extremes


@dataclass(frozen=True)
class Usage:
    """Of the last job of a shard. None where nobody knows."""

    shard: str
    state: str
    job: str | None
    node: str | None
    queue_s: float | None  # from its submission to its start; so far where it waits
    run_s: float | None  # so far where it runs
    max_rss_mb: float | None
    source: str  # sacct or worker: who says so


def collect(progress: RunProgress) -> list[Usage]:
    """What is known of each shard."""
    accounts = executors.find_accounts(progress.jobs.values()) if progress.answers else {}
    return [_collect(shard, progress, accounts) for shard in progress.shards.values()]


def _collect(shard: ShardProgress, progress: RunProgress, accounts: dict[str, Account]) -> Usage:
    job = progress.jobs.get(shard.name)
    about = shard.name, shard.state, job.id if job else None, shard.node
    account = accounts.get(job.id) if job else None
    if account is not None and (account.queue_s is not None or account.run_s is not None):
        rss = account.max_rss_mb if account.max_rss_mb is not None else shard.rss_mb
        return Usage(*about, account.queue_s, account.run_s, rss, "sacct")
    queue_s, run_s = shard.queue_s, shard.run_s
    if shard.submitted is not None and not shard.started and shard.state == "queued":
        queue_s = time.time() - shard.submitted
    if shard.begun is not None and shard.state == "running":
        run_s = shard.ran_s + time.time() - shard.begun
    return Usage(*about, queue_s, run_s, shard.rss_mb, "worker")


def to_json(found: Iterable[Usage]) -> list[dict[str, Any]]:
    """The same for `--json`: whole seconds and MB."""
    return [
        {name: round(value) if isinstance(value, float) else value for name, value in asdict(each).items()}
        for each in found
    ]


def tabulate(found: list[Usage]) -> Table | str:
    """A table with a line a shard; of many shards one sentence with medians and extremes."""
    if len(found) > LINES:
        spreads = (
            _spread("queue time", {u.shard: u.queue_s for u in found}, format_duration),
            _spread("run time", {u.shard: u.run_s for u in found}, format_duration),
            _spread("MaxRSS", {u.shard: u.max_rss_mb for u in found}, format_memory),
        )
        return "; ".join(filter(None, spreads))
    table = Table(title="Jobs", title_justify="left")
    for name in ("shard", "job", "node", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("queue time", "run time", "MaxRSS"):
        table.add_column(name, justify="right", no_wrap=True)
    for u in found:
        table.add_row(
            u.shard,
            u.job or "",
            u.node or "",
            u.state,
            format_duration(u.queue_s),
            format_duration(u.run_s),
            format_memory(u.max_rss_mb),
        )
    return table


def _spread(name: str, values: dict[str, float | None], form: Callable[[float], str]) -> str:
    known = {shard: value for shard, value in values.items() if value is not None}
    if not known:
        return ""
    most = max(known, key=known.__getitem__)
    return f"{name}: median {form(statistics.median(known.values()))}, at most {form(known[most])} (shard {most})"


def format_duration(seconds: float | None) -> str:
    """`0:07`, `12:30` or `3:00:00`; empty where nobody knows."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_memory(mb: float | None) -> str:
    """`812 MB` or `2.1 GB`; empty where nobody knows."""
    return "" if mb is None else f"{mb:.0f} MB" if mb < 1000 else f"{mb / 1000:.1f} GB"
