"""Moves the rows of runs into one file for each op, `results/<device>/<op>.parquet`, so that a clone has few files.

    uv run python tools/merge_rows.py results/nvidia-h200/20261124-074022-f3ae [more runs ...]

A run leaves a file for each of its shards. This adds their rows to the file of their op, sorted by run, and deletes the run's
files. Before that it reads back what it wrote and compares every cell. A row that the op's file has already is not added
again, so the same command can repeat a merge that was interrupted. `results/<device>/merged.json` keeps the names of the
deleted files, each with the digests of its rows in their order. A test compares them, so no cell can change unnoticed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from minfer.rows import store

MANIFEST = "merged.json"
KEY = ("run", "case", "node", "finished")  # a node finishes a case once at a time, so these name one row
NUMBERS = (pa.list_(pa.float64()), pa.list_(pa.int64()))
# Samples hardly repeat, so a dictionary would only make them larger.
REPEATED = [field.name for field in store.SCHEMA if not pa.types.is_list(field.type)]
SMALL = {**store.PARQUET, "compression_level": 19, "use_dictionary": REPEATED, "write_statistics": False}


class Refused(Exception):
    """Merging would lose something. The message is one sentence that says what, and what to do."""


def merge(runs: Iterable[Path]) -> str:
    """Merge the rows of run folders `results/<device>/<run>` into the files beside them. Returns a sentence that says what was
    done. Raises Refused or OSError before it deletes any file."""
    files = [path for run in sorted(set(runs)) for path in _files(run)]
    states = {path: _state(path) for path in files}
    tables = {path: read_whole(path) for path in files}
    for path, table in tables.items():
        _check_place(path, table)
    targets: dict[Path, list[pa.Table]] = {}
    for path, table in tables.items():
        for op in pc.unique(table["op"]).to_pylist():
            target = path.parents[1] / f"{op}.parquet"
            targets.setdefault(target, []).append(table.filter(pc.equal(table["op"], op)))
    added = sum(_add(target, parts) for target, parts in sorted(targets.items()))
    for device in sorted({path.parents[1] for path in files}):
        _note(device, {path: tables[path] for path in files if path.parents[1] == device})
    for path in files:
        if _state(path) != states[path]:
            raise Refused(f"{path} has changed since it was read; repeat the command when its run has ended")
    for path in files:
        path.unlink()
    for folder in {path.parent for path in files}:
        if not any(folder.iterdir()):  # not empty: profilers left files there
            folder.rmdir()
    total, folders = sum(map(len, tables.values())), sorted({str(target.parent) for target in targets})
    return (
        f"{total} rows of {len(files)} files are in {len(targets)} files of {', '.join(folders)}, where {total - added} were"
        f" before; every cell was compared before the {len(files)} files were deleted."
    )


def read_whole(path: Path) -> pa.Table:
    """Read a parquet file in the schema of `minfer.rows.store`, with nulls for columns that it lacks. Raises Refused if that
    would lose something, or the file cannot be read."""
    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow
        if other := sorted(set(found.names) - set(store.SCHEMA.names)):
            raise Refused(f"{path} has the column {other[0]}, which this version of minfer has not; use a newer one")
        for field in found:
            if field.type != (known := store.SCHEMA.field(field.name).type):
                raise Refused(f"{path} has the column {field.name} as {field.type}, not {known}; leave the file out")
        if found.metadata:
            raise Refused(f"{path} has metadata of its own ({sorted(found.metadata)[0].decode()}); leave the file out")
        return store.read_one(path, store.SCHEMA)
    except (pa.ArrowException, ValueError) as error:
        raise Refused(f"{path} cannot be read: {str(error).splitlines()[0]}; leave it out") from error


def digests(table: pa.Table) -> list[str]:
    """A digest of each row over the names and the exact values of its cells. Nulls do not count, so a column that the schema
    gains later changes no digest."""
    rows = [hashlib.blake2b(digest_size=16) for _ in range(len(table))]
    for name in sorted(table.column_names):
        for row, cell in zip(rows, _cells(table[name]), strict=True):
            if cell is not None:
                row.update(f"{name} {len(cell)} ".encode() + cell)
    return [row.hexdigest() for row in rows]


def _cells(column: pa.ChunkedArray) -> list[bytes | None]:
    """Each value of a column as bytes, None where it is null."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    if column.type in NUMBERS and not pc.list_flatten(column).null_count:
        found: list[bytes | None] = []
        for chunk in column.chunks:
            ends, values = chunk.offsets.to_numpy(), chunk.values.to_numpy()
            spans = zip(ends[:-1], ends[1:], chunk.is_valid().to_pylist(), strict=True)
            found += [values[begin:end].tobytes() if valid else None for begin, end, valid in spans]
        return found
    return [None if value is None else json.dumps(value).encode() for value in column.to_pylist()]


def _files(run: Path) -> list[Path]:
    if found := sorted(path for path in run.glob("*.parquet") if not path.name.startswith(".")):
        return found
    raise Refused(
        f"{run} has no parquet files; name the folder of a run, such as results/nvidia-h200/20261124-074022-f3ae"
    )


def _state(path: Path) -> tuple[int, int, int]:
    """A value that changes when a file is written again."""
    now = path.stat()
    return now.st_ino, now.st_size, now.st_mtime_ns


def _check_place(path: Path, table: pa.Table) -> None:
    """Raise Refused for a row whose run or device does not match its folder, or whose op cannot be a file name."""
    for run, device, op in zip(*(table[name].to_pylist() for name in ("run", "device", "op")), strict=True):
        if run != path.parent.name:
            raise Refused(f"{path} has a row of the run {run}; name folders results/<device>/<run> with their own rows")
        if store.slug(device or "") != path.parents[1].name:
            raise Refused(f"{path} has a row of the device {device}; its folder would be {store.slug(device or '')}")
        if not op or not op.isidentifier():
            raise Refused(f"{path} has a row of the op {op!r}, which names no file; leave the file out")


def _add(target: Path, parts: list[pa.Table]) -> int:
    """Add rows to the file of an op, and return how many were new. Raises Refused."""
    parts = [read_whole(target), *parts] if target.exists() else parts
    before = len(parts[0]) if target.exists() else 0
    table = pa.concat_tables(parts)
    places = {digest: place for place, digest in reversed(list(enumerate(digests(table))))}  # the first place of each
    table = table.take(sorted(places.values()))
    keys = list(zip(*(table[name].to_pylist() for name in KEY), strict=True))
    if len(set(keys)) < len(keys):
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise Refused(f"{target} would have two rows with different cells for the same {twice}; leave one of them out")
    runs = table["run"].to_pylist()
    table = table.take(sorted(range(len(table)), key=runs.__getitem__))
    if len(table) == before:
        return 0
    with store.write_whole(target) as file:
        pq.write_table(table, file, **SMALL)
        file.flush()
        if sorted(digests(read_whole(Path(file.name)))) != sorted(places):
            raise Refused(f"{target} does not read back as it was written; the disk or its file system may be broken")
    return len(table) - before


def _note(device: Path, tables: dict[Path, pa.Table]) -> None:
    """Append the names of files and the digests of their rows to the manifest."""
    path = device / MANIFEST
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for file, table in tables.items():
        name = file.relative_to(device).as_posix()
        known[name] = " ".join(dict.fromkeys([*known.get(name, "").split(), *digests(table)]))
    with store.write_whole(path) as out:
        out.write(json.dumps(known, indent=0, sort_keys=True).encode() + b"\n")


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where nothing was deleted, with one line that says why."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, results/<device>/<run>")
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    try:
        print(merge(options.runs))
    except (Refused, OSError) as error:
        print(f"merge_rows: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
