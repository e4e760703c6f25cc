"""Which kernels were the fastest at what, from parquet: `python analysis/make_best.py`.

Reads results/**/*.parquet and writes minfer/functional/best.json, by which functions such as `minfer.matmul` choose: for
each op, architecture, dtype, parameters and shape our own kernels that are right there, fastest first, by their cold
times on one clock. PyTorch's are not among them: what those functions reach is what these kernels reach.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from analysis.command import Options, parser, run
from analysis.rows import number, on_one_clock, with_problem
from minfer.rows import store

COMMAND = "python analysis/make_best.py"
TABLE = Path("minfer/functional/best.json")
COLUMNS = ["run", "finished", "case", "op", "kernel", "backend", "dtype", "params", "shape", "status", "cold_us"]
COLUMNS += ["device", "device_kind", "arch", "baseline", "cold_baseline_us", "cold_speedup"]


def entries(table: pa.Table) -> dict[str, list[dict[str, Any]]]:
    """What the rows say of each op, in order: by architecture, device, dtype, parameters and shape."""
    found: dict[str, dict[tuple[Any, ...], dict[str, float]]] = {}
    for row in on_one_clock(with_problem(table)).to_pylist(maps_as_pydicts="lossy"):
        us, arch = number(row, "cold_us"), "cpu" if row["device_kind"] == "cpu" else row["arch"]
        ours = row["status"] in store.MEASURED and row["backend"] not in (None, "torch")
        if us and ours and arch and row["dtype"] and row["shape"]:
            maps = (tuple((row[name] or {}).items()) for name in ("params", "shape"))
            key = (arch, row["device"], row["dtype"], *maps)
            found.setdefault(row["op"], {}).setdefault(key, {})[row["kernel"]] = round(us, 3)
    return {op: [entry(key, us) for key, us in sorted(problems.items())] for op, problems in sorted(found.items())}


def entry(key: tuple[Any, ...], us: dict[str, float]) -> dict[str, Any]:
    arch, device, dtype, params, shape = key
    named = {"arch": arch, "device": device, "dtype": dtype, "params": dict(params), "shape": dict(shape)}
    return named | {"kernels": dict(sorted(us.items(), key=lambda item: (item[1], item[0])))}


def text(found: dict[str, list[dict[str, Any]]]) -> str:
    """The file: a line a problem."""
    ops = (f"{json.dumps(op)}: [\n" + ",\n".join(map(json.dumps, of)) + "\n]" for op, of in found.items())
    return "{\n" + ",\n".join(ops) + "\n}\n"


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit status: 0 when the table is that of the results, and every file could be read."""
    return run(parser(COMMAND, __doc__ or "", "--table", TABLE), arguments, COLUMNS, write, all_or_nothing=True)


def write(rows: pa.Table, options: Options) -> list[str]:
    new = text(entries(rows))
    if options.check:
        same = options.table.is_file() and options.table.read_text() == new
        return [] if same else [f"{options.table} is out of date: run `{COMMAND}`"]
    options.table.write_text(new)
    return []


if __name__ == "__main__":
    sys.exit(main())
