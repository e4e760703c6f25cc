"""The JSON tables of figures by problem that functions choose by: a line for each problem of an op."""

from __future__ import annotations

import json
from typing import Any

from analysis.command import Options
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


def write(table: Table, options: Options, command: str) -> list[str]:
    """Write the file `options.table`, or only check it; what is wrong, in sentences."""
    ops = (f"{json.dumps(op)}: [\n" + ",\n".join(map(json.dumps, of)) + "\n]" for op, of in table.items())
    new = "{\n" + ",\n".join(ops) + "\n}\n"
    if options.check:
        same = options.table.is_file() and options.table.read_text() == new
        return [] if same else [f"{options.table} is out of date: run `{command}`"]
    options.table.write_text(new)
    return []
