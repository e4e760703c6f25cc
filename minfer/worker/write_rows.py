"""Writes the rows of a shard: adds what a row has besides the measurement, and handles a full or missing disk."""

from __future__ import annotations

import datetime
import errno
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from minfer import ops
from minfer.bench import rules_of
from minfer.bench.timing import Timing
from minfer.fingerprint import fingerprint
from minfer.ops import Case
from minfer.plan.shard import Shard
from minfer.rows import store
from minfer.rows.store import Row
from minfer.rows.writer import StoreError, Writer
from minfer.worker.supervisor import Machine

PATIENCE_S = 60.0  # how long a results folder may be missing before a row is written elsewhere
GONE = (errno.ENOENT, errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN)


def complete(
    shard: Shard,
    machine: Machine,
    peaks: Mapping[str, float] | None,
    case: Case,
    columns: Row,
    skew_s: float,
    timing: Timing | None = None,
) -> Row:
    """The row of a case: its description, where, when and how it was timed (the shard's `timing` if nothing else is said), and
    `columns`, which running it has filled."""
    kernel = ops.get(case.op).kernels[case.kernel]
    return {
        **columns,
        "run": shard.run,
        "case": case.key,
        **case.to_dict(),
        "backend": kernel.backend,
        "source": fingerprint(kernel, machine.arch, rules_of(columns.get("guarantee"))),
        "timing": (timing or shard.timing).name,
        "drawn": shard.drawn,
        "finished": datetime.datetime.fromtimestamp(time.time() + skew_s, datetime.UTC),
        "commit": shard.commit,
        "peaks": peaks,
        **machine.environment,
    }


def append(writer: Writer, row: Row, tell: Callable[..., None]) -> Path:
    """Write a row, in the place of an earlier one of its case. If the results folder is missing, wait for it for PATIENCE_S.
    Raises StoreError."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return writer.replace(row)
        except StoreError as error:
            if getattr(error.__cause__, "errno", None) not in GONE or time.monotonic() > deadline:
                raise
        tell(event="waiting", why="the results folder is gone")
        time.sleep(1)


def rescue(shard: Shard, error: StoreError) -> str:
    """Write rows that could not be written to the results folder to another one; the returned sentence says which."""
    for folder in (Path(shard.folder), Path("/tmp")):  # not TMPDIR, which is removed with the job
        path = folder / f"minfer-{shard.run}-{shard.name}-rescued.parquet"
        try:
            store.write(store.to_table(error.rows), path)
            return f"its {len(error.rows)} unwritten rows are in {path}"
        except OSError:
            continue
    return f"its {len(error.rows)} unwritten rows are lost"
