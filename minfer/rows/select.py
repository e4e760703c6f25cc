"""Of rows as a table: which are the newest, and their throughput whatever their age. All on columns, because a million
rows must not take more than seconds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minfer.rows import store
from minfer.rows.rules import REGIMES
from minfer.rows.store import MEASURED

TFLOPS = "TFLOP/s"  # the metric of rows that are older than the column
STEADY = ("steady_", "energy_")  # how the columns of the steady regime begin
STATE = ("sm_mhz", "memory_mhz", "power_w", "temperature_c", "throttle")  # of the machine, during steady calls
WIDE = 0.25  # an interval of a speed-up, over the speed-up: such a row must not hide an older one that says more
SPEEDUPS = tuple(f"{regime}_speedup{end}" for regime in REGIMES for end in ("", "_low", "_high"))
ORIGIN = ("run", "finished", "commit", "torch", "driver")  # what says where a figure comes from


def read_shown(paths: Iterable[Path], columns: Iterable[str]) -> tuple[pa.Table, dict[Path, str]]:
    """What tables, plots, reports and comparisons show of parquet files, and what is wrong with each file that could not be
    read.

    If a kernel was judged (`untrusted=true`), what its own process measured is a hint only. So the judge's figures take the
    place of the cold ones, because its blocks begin with flushed caches and new inputs, and the steady ones are null."""
    columns = list(columns)
    judges = {name: f"judged_{name.removeprefix('cold_')}" for name in columns if name.startswith("cold_")}
    judges = {name: of_judge for name, of_judge in judges.items() if of_judge in store.SCHEMA.names}
    table, bad = store.read(paths, dict.fromkeys([*columns, "guarantee", *judges.values()]))
    if pc.any(outside := are_judged(table)).as_py():
        for name in columns:
            if name.startswith(("cold_", *STEADY)) or name in STATE:
                nulls = pa.nulls(len(table), table[name].type)
                values = table[judges[name]] if name in judges else nulls
                table = _replace_column(table, name, pc.if_else(outside, values, table[name]))
    return table.select(columns), bad


def are_judged(table: pa.Table) -> pa.ChunkedArray:
    """Which rows are of kernels that were judged; none, where the table has no column `guarantee`."""
    if "guarantee" not in table.column_names:
        return pa.chunked_array([np.zeros(len(table), dtype=bool)])
    return pc.fill_null(pc.starts_with(table["guarantee"], "judged"), False)


def is_judged(row: store.Row) -> bool:
    """Whether the judge's figures are the result, and those of the kernel's own process are hints (`untrusted=true`)."""
    return str(row["guarantee"] or "").startswith("judged")


def newest(table: pa.Table, regime: str | None = None) -> pa.Table:
    """Of the rows with the same device and case, the one finished last; of those finished at once, the last run's.

    With a regime (`cold`, `steady`) rows that were timed only in the other one do not count: of a case that was timed in
    this regime, or failed, the last such row is kept, else the last row. A failure counts in both regimes."""
    groups = _Groups(table)
    keep = np.zeros(len(table), dtype=bool)
    keep[groups.last(groups.say_something(regime) if regime else None)] = True
    return table if keep.all() else table.filter(pa.array(keep))


def newest_of_each_regime(table: pa.Table) -> pa.Table:
    """One row a device and case, with the cold figures of the newest row for cold and the steady figures (energy too) of
    the newest row for steady, as `newest` chooses them: a new run with cold times only does not hide older steady times,
    and a row whose speed-up is uncertain (`WIDE`) hides no other. The `metrics` are those of the newest row with
    counters of Nsight Compute: a run without it does not hide older counters.

    Each regime's figures stay together with the baseline that was timed beside them; so steady figures that are in another
    unit, against another baseline, or of a kernel that was not judged beside one that was, are not joined to the row with
    the cold ones. All other columns are those of the row
    with the cold figures, or of the last row where the newest for cold failed or has no time. `steady_run`, `steady_commit`,
    … are the columns of `ORIGIN` of the row with the steady figures, `counted_run`, … those of the row with the counters."""
    groups = _Groups(table)
    last, cold, steady, counted = groups.choose()
    base = np.where(groups.are_timed("cold")[cold], cold, last)
    joined = np.where(groups.are_timed("steady")[steady], steady, base)
    counted = np.where(groups.have_counters[counted], counted, base)
    for name in ("baseline", "metric"):
        if name in table.column_names:
            values = codes(table[name])
            joined = np.where(values[base] == values[joined], joined, base)
    outside = are_judged(table).to_numpy()
    joined = np.where(outside[base] == outside[joined], joined, base)
    order = np.argsort(base)  # as the rows were
    base, joined, counted = base[order], joined[order], counted[order]
    places = pa.array(joined)
    merged = table if len(base) == len(table) else table.take(pa.array(base))
    differ = bool(np.any(base != joined))
    for name in table.column_names:
        if differ and (name.startswith(STEADY) or name in STATE):
            merged = _replace_column(merged, name, table[name].take(places))
        if name in ORIGIN:
            merged = merged.append_column(f"steady_{name}", table[name].take(places) if differ else merged[name])
    if "metrics" in table.column_names:
        places = pa.array(counted)
        merged = _replace_column(merged, "metrics", table["metrics"].take(places))
        for name in ORIGIN:
            if name in table.column_names:
                merged = merged.append_column(f"counted_{name}", table[name].take(places))
    return merged


def newest_in_any_regime(table: pa.Table) -> pa.Table:
    """The rows that `newest_of_each_regime` takes its figures from: at most four for each device and case, unchanged and in
    their order. It makes the same table of them as of all rows. So a caller can drop older rows after each part of a table."""
    keep = np.zeros(len(table), dtype=bool)
    for places in _Groups(table).choose():
        keep[places] = True
    return table if keep.all() else table.filter(pa.array(keep))


class _Groups:
    """The rows of a table by device and case, in the order in which they were finished."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        case, device, run = (codes(table[name]) for name in ("case", "device", "run"))
        finished = pc.fill_null(table["finished"].cast(pa.int64()), np.iinfo(np.int64).min).to_numpy()
        self.order = np.lexsort((run, finished, device, case))
        begins = np.ones(len(table), dtype=bool)
        begins[1:] = (np.diff(case[self.order]) != 0) | (np.diff(device[self.order]) != 0)
        self.first = np.flatnonzero(begins)

    def choose(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The places of four rows of each group: the last one, the last that says something of the cold regime, the last that
        says something of the steady regime, and the last with counters."""
        cold, steady = (self.last(self.say_something(regime)) for regime in REGIMES)
        return self.last(None), cold, steady, self.last(self.have_counters)

    def last(self, wanted: np.ndarray | None) -> np.ndarray:
        """The place of each group's last wanted row, or of its last row where none is wanted."""
        places = np.arange(len(self.order))
        if wanted is not None:
            places = np.where(wanted[self.order], places + len(places), places)
        found: np.ndarray = np.maximum.reduceat(places, self.first) if len(places) else places
        return self.order[found % max(1, len(places))]

    def are_timed(self, regime: str) -> np.ndarray:
        """Which rows have a time in a regime, and a speed-up whose interval is not `WIDE`; all, where the table has no such
        column."""
        if f"{regime}_us" not in self.table.column_names:
            return np.ones(len(self.order), dtype=bool)
        timed: np.ndarray = pc.and_(pc.is_valid(self.table[f"{regime}_us"]), pc.invert(self.have_failed)).to_numpy()
        names = [name for name in SPEEDUPS if name.startswith(regime)]
        if set(names) <= set(self.table.column_names):
            ratio, low, high = (pc.fill_null(self.table[name].cast(pa.float64()), np.nan).to_numpy() for name in names)
            wide = high - low > WIDE * ratio
            timed = timed & (~wide | are_judged(self.table).to_numpy())  # a judged interval spans few blocks
        return timed

    def say_something(self, regime: str) -> np.ndarray:
        """Which rows say something of a regime: a time, or that the kernel failed."""
        return self.are_timed(regime) | self.have_failed.to_numpy()

    @cached_property
    def have_counters(self) -> np.ndarray:
        """Which rows have counters of Nsight Compute among their metrics; all, where the table has no such column."""
        if "metrics" not in self.table.column_names:
            return np.ones(len(self.order), dtype=bool)
        maps = self.table["metrics"].combine_chunks()
        of_ncu = pc.starts_with(maps.keys, "ncu.").to_numpy(zero_copy_only=False)
        before = np.concatenate([[0], np.cumsum(of_ncu)])  # how many such keys stand before each
        found: np.ndarray = np.diff(before[maps.offsets.to_numpy()]) > 0
        return found

    @cached_property
    def have_failed(self) -> pa.ChunkedArray:
        """Which rows are of a case that was not measured, for whatever reason."""
        return pc.invert(pc.fill_null(pc.is_in(self.table["status"], pa.array(MEASURED)), False))


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
    for regime in REGIMES:
        rate, tflops = f"{regime}_rate", f"{regime}_tflops"
        if {rate, tflops} <= set(table.column_names):
            table = _replace_column(table, rate, pc.if_else(old, table[tflops], table[rate]))
    return _replace_column(table, "metric", pc.fill_null(table["metric"], TFLOPS))


def _replace_column(table: pa.Table, name: str, values: pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.column_names.index(name), table.schema.field(name), values)
