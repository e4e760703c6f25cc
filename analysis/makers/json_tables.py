"""The JSON tables of figures by problem that functions choose by: a line for each problem of an op."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from minfer.analysis.command import Options, parser, run
from minfer.rows.store import Row

Key = tuple[Any, ...]  # architecture, device, dtype, parameters and shape
Table = dict[str, list[dict[str, Any]]]  # by op


def key(row: Row) -> Key | None:
    """The problem of a row; None where the row does not say all of it."""
    arch = "cpu" if row["device_kind"] == "cpu" else row["arch"]
    maps = (tuple((row[name] or {}).items()) for name in ("params", "shape"))
    return (arch, row["device"], row["dtype"], *maps) if arch and row["dtype"] and row["shape"] else None


def entry(problem: Key, name: str, figures: dict[str, float]) -> dict[str, Any]:
    """A line: the problem, and under `name` its figures by kernel."""
    arch, device, dtype, params, shape = problem
    named = {"arch": arch, "device": device, "dtype": dtype, "params": dict(params), "shape": dict(shape)}
    return named | {name: figures}


def main(
    arguments: Iterable[str] | None,
    program: tuple[str, str],
    table: Path,
    columns: Iterable[str],
    entries: Callable[[pa.Table], Table],
) -> int:
    """The program, by its command and what it is about, that writes `entries` of the rows to `table`. Returns the exit status:
    0 when the table is that of the results, and every file could be read."""
    command, about = program
    write = lambda rows, options: _write(entries(rows), options, command)
    return run(parser(command, about, "--table", table), arguments, columns, write, all_or_nothing=True)


def _write(table: Table, options: Options, command: str) -> list[str]:
    """Write the file `options.table`, or only check it; what is wrong, in sentences."""
    ops = (f"{json.dumps(op)}: [\n" + ",\n".join(map(json.dumps, of)) + "\n]" for op, of in table.items())
    new = "{\n" + ",\n".join(ops) + "\n}\n"
    if options.check:
        same = options.table.is_file() and options.table.read_text() == new
        return [] if same else [f"{options.table} is out of date: run `{command}`"]
    options.table.write_text(new)
    return []
