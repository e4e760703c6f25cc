"""By which factor kernels were faster than eager PyTorch, from parquet: `python analysis/make.py fusion`.

Reads results/**/*.parquet and writes minfer/fusion/measured.json, by which `minfer.fuse` decides what to replace: for each op
of it, architecture, dtype, parameters and shape the cold speed-ups of our kernels, of PyTorch's function and of torch.compile,
each paired with the baseline in the same rounds.
"""

from __future__ import annotations

import pyarrow as pa

from minfer.analysis.data.prepare import WHICH, with_problem
from minfer.analysis.makers import Maker, Options, json_tables
from minfer.rows import store
from minfer.rows.problems import number

COMMAND = "python analysis/make.py fusion"
OPS = ("add_rmsnorm", "axpby", "gated_unit", "gemm_bias_gelu", "gemm_bias_relu", "rmsnorm", "rope", "silu_mul")
PYTORCH = ("torch", "torch_compile")  # what a program would run instead
COLUMNS = [*WHICH, "dtype", "params", "shape", "baseline"]
COLUMNS += ["cold_speedup", "device", "device_kind", "arch"]


def entries(table: pa.Table) -> json_tables.Table:
    """What the rows say of each op, in order: by architecture, device, dtype, parameters and shape; problems that none of our
    kernels, or nothing of PyTorch's, was measured at are left out."""
    found: dict[str, dict[json_tables.Key, dict[str, float]]] = {}
    for row in with_problem(table).to_pylist(maps_as_pydicts="lossy"):
        speedup, key = number(row, "cold_speedup"), json_tables.key(row)
        shown = row["backend"] not in (None, "torch") or row["kernel"] in PYTORCH
        known = row["op"] in OPS and row["baseline"] == "torch" and row["status"] in store.MEASURED
        if speedup and shown and known and key:
            found.setdefault(row["op"], {}).setdefault(key, {})[row["kernel"]] = round(speedup, 3)
    both = lambda speedups: speedups.keys() & set(PYTORCH) and speedups.keys() - set(PYTORCH)
    return {
        op: [
            json_tables.entry(key, "speedups", dict(sorted(of.items())))
            for key, of in sorted(problems.items())
            if both(of)
        ]
        for op, problems in sorted(found.items())
    }


def write(table: pa.Table, options: Options) -> list[str]:
    return json_tables.update(options.fusion, entries(table), COMMAND, options.check)


MAKER = Maker(write, COLUMNS)
