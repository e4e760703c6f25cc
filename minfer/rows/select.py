"""Of rows as a table: which are the newest, and their throughput whatever their age. All on columns, because a million
rows must not take more than seconds."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

TFLOPS = "TFLOP/s"  # the metric of rows that are older than the column


def newest(table: pa.Table) -> pa.Table:
    """Of the rows with the same device and case, the one finished last; of those finished at once, the last run's."""
    case, device, run = (codes(table[name]) for name in ("case", "device", "run"))
    finished = pc.fill_null(table["finished"].cast(pa.int64()), np.iinfo(np.int64).min).to_numpy()
    order = np.lexsort((run, finished, device, case))
    last = np.ones(len(table), dtype=bool)
    last[:-1] = (np.diff(case[order]) != 0) | (np.diff(device[order]) != 0)
    keep = np.zeros(len(table), dtype=bool)
    keep[order[last]] = True
    return table if keep.all() else table.filter(pa.array(keep))


def codes(column: pa.ChunkedArray) -> np.ndarray:
    """A number for each text, in the texts' order; -1 for null."""
    encoded = column.dictionary_encode().combine_chunks()
    rank = np.full(len(encoded.dictionary) + 1, -1)
    rank[pc.array_sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(encoded.dictionary))
    found: np.ndarray = rank[pc.fill_null(encoded.indices, len(encoded.dictionary)).to_numpy()]
    return found


def with_rates(table: pa.Table) -> pa.Table:
    """The same table, with `metric` and rates filled in where rows are older than these columns: TFLOP/s.

    A table without `metric` stays as it is, and a rate needs its column of TFLOP/s."""
    if "metric" not in table.column_names or not table["metric"].null_count:
        return table
    old = pc.is_null(table["metric"])
    for regime in ("cold", "steady"):
        rate, tflops = f"{regime}_rate", f"{regime}_tflops"
        if {rate, tflops} <= set(table.column_names):
            table = _replaced(table, rate, pc.if_else(old, table[tflops], table[rate]))
    return _replaced(table, "metric", pc.fill_null(table["metric"], TFLOPS))


def _replaced(table: pa.Table, name: str, values: pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.column_names.index(name), table.schema.field(name), values)
