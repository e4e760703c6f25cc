"""Runs the profilers over a shard's cases, one profiler after the other, once all rows are on disk, and adds what they find
to the rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from minfer import profilers
from minfer.ops import Case
from minfer.plan.shard import Shard
from minfer.rows.store import Row
from minfer.rows.writer import Writer
from minfer.worker.confinement import is_ours

UNCONFINED = "not run: a profiler needs what the sandbox of untrusted=true denies"
AMEND_S = 5.0  # how often rows are amended while a profiler runs: a part of 64 rows takes 50 ms to write


def profile(
    shard: Shard,
    setting: profilers.Setting,
    statuses: list[tuple[Case, str]],
    writer: Writer,
    tell: Callable[..., None],
) -> None:
    """`statuses` are the cases that have rows, with their status. Raises StoreError."""
    foreign = [case for case, _ in statuses if shard.untrusted and not is_ours(case)]
    statuses = [(case, status) for case, status in statuses if case not in foreign]
    for name, options in shard.profilers.items():
        tell(event="profiler", profiler=name, cases=len(statuses))
        found: dict[str, Row] = {case.key: {"profilers": {name: UNCONFINED}} for case in foreign}
        written = time.monotonic()
        try:
            with contextlib.closing(profilers.run(name, options, statuses, setting)) as findings:
                for case, columns in findings:
                    found[case.key] = columns
                    tell(event="profiled", profiler=name, case=case.key, why=columns["profilers"][name])
                    if time.monotonic() > written + AMEND_S:
                        writer.amend(found)
                        found, written = {}, time.monotonic()
        finally:  # also when the job is stopped
            writer.amend(found)
