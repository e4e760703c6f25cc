"""Which kernel `minfer.matmul` calls, from parquet: `python analysis/make_best.py`.

Reads results/**/*.parquet and writes minfer/functional/best.json: for each architecture, dtype, layout and shape our own
kernels that are right there with fp32 accumulation, fastest first, by their cold times on one clock. PyTorch's are not
among them: what `matmul` reaches is what these kernels reach.
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


def entries(table: pa.Table) -> list[dict[str, Any]]:
    """What the rows say, in order: by architecture, device, dtype, layout and shape."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in on_one_clock(with_problem(table)).to_pylist(maps_as_pydicts="lossy"):
        params, us = row["params"] or {}, number(row, "cold_us")
        counts = row["op"] == "hgemm" and row["status"] in store.MEASURED and params.get("accumulate") == "float32"
        if counts and us and row["backend"] not in (None, "torch"):
            arch = "cpu" if row["device_kind"] == "cpu" else row["arch"]
            shape = tuple(row["shape"][axis] for axis in "mnk")
            key = (arch, row["device"], row["dtype"], params["layout"], *shape)
            found.setdefault(key, {})[row["kernel"]] = round(us, 3)
    names = ("arch", "device", "dtype", "layout", "m", "n", "k")
    return [
        dict(zip(names, key, strict=True)) | {"kernels": dict(sorted(us.items(), key=lambda item: (item[1], item[0])))}
        for key, us in sorted(found.items())
    ]


def text(found: list[dict[str, Any]]) -> str:
    """The file: a line a shape."""
    return "[\n" + ",\n".join(json.dumps(entry) for entry in found) + "\n]\n"


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
