"""Which kernels were the fastest at what, from parquet: `python analysis/make_best.py`.

Reads the parquet files of results/ that git tracks and writes minfer/functional/best.json, by which functions such as
`minfer.matmul` choose: for each op, architecture, dtype, parameters and shape our own kernels that are right there, fastest
first, by their cold times on one clock. PyTorch's are not among them: what those functions reach is what these kernels reach.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from minfer.analysis import by_problem
from minfer.analysis.rows import WHICH, number, on_one_clock, with_problem
from minfer.rows import store
from minfer.rows.select import are_judged

COMMAND = "python analysis/make_best.py"
TABLE = Path("minfer/functional/best.json")
COLUMNS = [*WHICH, "dtype", "params", "shape", "cold_us"]
COLUMNS += ["device", "device_kind", "arch", "baseline", "cold_baseline_us", "cold_speedup"]


def entries(table: pa.Table) -> by_problem.Table:
    """What the rows say of each op, in order: by architecture, device, dtype, parameters and shape."""
    found: dict[str, dict[by_problem.Key, dict[str, float]]] = {}
    table = table.filter(pc.invert(are_judged(table)))  # whose times are of blocks, not of single calls
    for row in on_one_clock(with_problem(table)).to_pylist(maps_as_pydicts="lossy"):
        us, key = number(row, "cold_us"), by_problem.key(row)
        ours = row["status"] in store.MEASURED and row["backend"] not in (None, "torch")
        if us and ours and key:
            found.setdefault(row["op"], {}).setdefault(key, {})[row["kernel"]] = round(us, 3)
    fastest_first = lambda us: dict(sorted(us.items(), key=lambda item: (item[1], item[0])))
    return {
        op: [by_problem.entry(key, "kernels", fastest_first(us)) for key, us in sorted(problems.items())]
        for op, problems in sorted(found.items())
    }


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit status: 0 when the table is that of the results, and every file could be read."""
    return by_problem.main(arguments, (COMMAND, __doc__ or ""), TABLE, COLUMNS, entries)


if __name__ == "__main__":
    sys.exit(main())
