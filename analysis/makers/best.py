"""Which kernels were the fastest at what, from parquet: `python analysis/make.py best`.

Reads the parquet files of results/ that git tracks and writes minfer/functional/best.json, by which functions such as
`minfer.matmul` choose: for each op, architecture, dtype, parameters and shape our own kernels that are right there, fastest
first, by their cold times on one clock. PyTorch's are not among them: what those functions reach is what these kernels reach.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from minfer.analysis.data.prepare import WHICH, on_one_clock, with_problem
from minfer.analysis.makers import Maker, Options, json_tables
from minfer.rows import store
from minfer.rows.problems import number
from minfer.rows.select import are_judged

COMMAND = "python analysis/make.py best"
COLUMNS = [*WHICH, "dtype", "params", "shape", "cold_us"]
COLUMNS += ["device", "device_kind", "arch", "baseline", "cold_baseline_us", "cold_speedup"]


def entries(table: pa.Table) -> json_tables.Table:
    """What the rows say of each op, in order: by architecture, device, dtype, parameters and shape."""
    found: dict[str, dict[json_tables.Key, dict[str, float]]] = {}
    table = table.filter(pc.invert(are_judged(table)))  # judged times are of blocks, not of single calls
    for row in on_one_clock(with_problem(table)).to_pylist(maps_as_pydicts="lossy"):
        us, key = number(row, "cold_us"), json_tables.key(row)
        ours = row["status"] in store.MEASURED and row["backend"] not in (None, "torch", "function")
        if us and ours and key:
            found.setdefault(row["op"], {}).setdefault(key, {})[row["kernel"]] = round(us, 3)
    fastest_first = lambda us: dict(sorted(us.items(), key=lambda item: (item[1], item[0])))
    return {
        op: [json_tables.entry(key, "kernels", fastest_first(us)) for key, us in sorted(problems.items())]
        for op, problems in sorted(found.items())
    }


def write(table: pa.Table, options: Options) -> list[str]:
    return json_tables.update(options.best, entries(table), COMMAND, options.check)


MAKER = Maker(write, COLUMNS)
