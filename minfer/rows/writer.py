"""The rows of one shard, written as they come to `results/<device>/<run>/<shard>-<part>.parquet`.

The part in progress is rewritten with every row, to a temporary name that then replaces it, so a file is always whole and
losing a job loses at most the case in flight. The parts of a shard that is done become one file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from minfer.rows.store import AMENDABLE, PARQUET, SCHEMA, Row, read_one, to_arrow, to_table, write, write_whole

ROWS_PER_PART = 64  # rewriting a part costs milliseconds
ROWS_PER_GROUP = 2048  # of a finished shard's file: large groups read fast


class StoreError(Exception):
    """Rows could not be written; the message says where and why, and `rows` are the ones not yet on disk."""

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


class Writer:
    """Appends the rows of one shard. A fresh Writer never touches the parts of an earlier one."""

    def __init__(self, folder: Path, shard: str) -> None:
        self.folder, self.shard = folder, shard
        self.rows: list[Row] = []
        self.part = 0
        self.parts: list[Path] = []
        self.where: dict[str, Path] = {}  # case -> the part that holds its row
        # Once, and append says it if this fails: a folder that is gone later must not be made anew, on a disk under its mount.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)

    def append(self, row: Row) -> Path:
        """Write a row to disk and return its file. Raises StoreError."""
        if not self.rows:
            while self._path().exists():
                self.part += 1
        return self._write([*self.rows, row])

    def replace(self, row: Row) -> Path:
        """Write a row, remove the one that its case had before according to `where`, if any, and return the new row's file.
        The new row is on disk before the old one is removed. A reader may find both; the newest counts. Raises StoreError."""
        old = self.where.get(row["case"])
        if self.rows and old == self._path():
            return self._write([*(each for each in self.rows if each["case"] != row["case"]), row])
        path = self.append(row)
        if old is not None:
            self._drop(row["case"], old)
        return path

    def _write(self, rows: list[Row]) -> Path:
        """Write the part in progress, of which the last row is new."""
        path = self._path()
        try:
            write(to_table(rows), path)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}", rows[-1:]) from error
        self.rows = rows
        self.where[rows[-1]["case"]] = path
        if path not in self.parts:
            self.parts.append(path)
        if len(rows) == ROWS_PER_PART:
            self.rows, self.part = [], self.part + 1
        return path

    def _drop(self, case: str, path: Path) -> None:
        """Remove the row of a case from a part that is complete. If that fails, the part stays as it is."""
        with contextlib.suppress(OSError, pa.ArrowException):
            table = read_one(path, SCHEMA)
            if rest := table.filter(pc.not_equal(table["case"], case)):
                write(rest, path)
            else:
                path.unlink()
                self.parts = [part for part in self.parts if part != path]

    def amend(self, columns: Mapping[str, Row]) -> None:
        """Add to the maps of rows that this Writer appended, by case; nothing else of them can change.

        Raises StoreError, and then the files are whole; KeyError for another column or an unknown case."""
        if other := {name for row in columns.values() for name in row} - set(AMENDABLE):
            raise KeyError(f"not to be amended: {', '.join(sorted(other))}")
        parts: dict[Path, dict[str, Row]] = {}
        for case, row in columns.items():
            parts.setdefault(self.where[case], {})[case] = row
        for path, rows in parts.items():
            try:
                write(_amend_table(read_one(path, SCHEMA), rows), path)
            except (OSError, pa.ArrowException) as error:
                why = error.strerror if isinstance(error, OSError) and error.strerror else error
                lost = [{"case": case, **row} for case, row in rows.items()]
                raise StoreError(f"cannot amend {path}: {why}", lost) from error
            if path == self._path():  # what is appended from now on must not bring the old rows back
                self.rows, self.part = [], self.part + 1

    def close(self) -> None:
        """Merge the parts into the first: one large file reads faster than many small ones."""
        if len(self.parts) < 2:
            return
        groups = range(0, len(self.parts), ROWS_PER_GROUP // ROWS_PER_PART)
        with contextlib.suppress(OSError, pa.ArrowException):  # on a full disk the parts stay as they are
            with write_whole(self.parts[0]) as file, pq.ParquetWriter(file, SCHEMA, **PARQUET) as merged:
                for start in groups:
                    group = self.parts[start : start + groups.step]
                    merged.write_table(pa.concat_tables(read_one(path, SCHEMA) for path in group))
            for path in self.parts[1:]:
                path.unlink()

    def _path(self) -> Path:
        return self.folder / f"{self.shard}-{self.part:03d}.parquet"


def _amend_table(table: pa.Table, rows: Mapping[str, Row]) -> pa.Table:
    """The table with more in the maps of some cases' rows."""
    cases = table["case"].to_pylist()
    for name in AMENDABLE:
        values = table[name].to_pylist(maps_as_pydicts="strict")
        values = [
            to_arrow({**(v or {}), **rows.get(c, {}).get(name, {})} or v) for c, v in zip(cases, values, strict=True)
        ]
        field = SCHEMA.field(name)
        table = table.set_column(table.column_names.index(name), field, pa.array(values, type=field.type))
    return table
