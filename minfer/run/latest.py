"""The rows of one run: of each case of each shard the one that was finished last."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from minfer.rows import store


def files(results: Path, run: str) -> list[Path]:
    """The parquet files of a run."""
    return [path for folder in sorted(results.glob(f"*/{run}")) for path in store.files(folder)]


def rows(results: Path, run: str, columns: Iterable[str]) -> dict[tuple[str, str], store.Row]:
    """The newest row of each case of a run, by shard and case: a case that was done again has several."""
    found: dict[tuple[str, str], store.Row] = {}
    for path in files(results, run):
        shard = path.stem.rpartition("-")[0]
        for row in store.rows([path], {"case", "finished", *columns}):
            key = shard, row["case"]
            if key not in found or _time(found[key]) <= _time(row):
                found[key] = row
    return found


def _time(row: store.Row) -> float:
    return row["finished"].timestamp() if row["finished"] else 0.0
