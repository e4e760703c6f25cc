"""The JSON tables of figures by problem that functions choose by: a line for each problem of an op."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def update(file: Path, table: Table, command: str, check: bool) -> list[str]:
    """Write a file, or only check it. Returns each problem as a sentence."""
    ops = (f"{json.dumps(op)}: [\n" + ",\n".join(map(json.dumps, of)) + "\n]" for op, of in table.items())
    new = "{\n" + ",\n".join(ops) + "\n}\n"
    if check:
        same = file.is_file() and file.read_text() == new
        return [] if same else [f"{file} is out of date: run `{command}`"]
    file.write_text(new)
    return []
