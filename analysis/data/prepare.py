"""Which rows the README's tables and plots show, and in which order.

All but the order is done on columns, because a million rows must not take more than seconds.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minfer.rows import store
from minfer.rows.problems import by_parts, natural, representative_problem
from minfer.rows.rules import MOST_DRIFT, REGIMES
from minfer.rows.select import (
    SPEEDUPS,
    are_judged,
    codes,
    newest_in_any_regime,
    newest_of_each_regime,
    read_shown,
    with_rates,
)

IDENTITY = ("case", "op", "kernel", "status")  # what a row must say to be shown
# Columns that say which row it is, and by which rows are chosen.
WHICH = ("run", "finished", "case", "op", "kernel", "backend", "status")
CASES = ("case", "count_distinct")  # of a group: counts a case once, however often it was run
MANY_ROWS = 500_000  # that `load` reads before it first drops older ones
MOST_LATE = 0.1  # share of cold windows that may contain the host's time and hardly move the median
WAITED = ("flags", "cold_late", "cold_baseline_late")  # columns that say whether the GPU waited for the host
REFERENCE = "torch"  # the kernel that the others are shown against


def load(files: Iterable[Path], results: Path, columns: Iterable[str]) -> tuple[pa.Table, list[str]]:
    """The usable rows of the named files, or of all files under `results` if none is named; and a sentence for each file that
    was skipped. Older rows that `with_problem` takes no figure from are left out. The table also has the columns by which the
    newest rows are chosen.

    It drops older rows while it reads files, each time the rows in memory have doubled: ten million do not fit into 4 GB.

    Raises FileNotFoundError where there is no such folder."""
    if not files and not results.is_dir():
        raise FileNotFoundError(f"{results} is not a folder: name the one with the results with --results")
    columns = _to_choose_by(columns)
    bad: dict[Path, str] = {}
    tables, held, most, unusable = [keep_usable(store.SCHEMA.empty_table().select(columns))], 0, MANY_ROWS, 0
    for file in sorted(set(files)) or store.files(results):
        table, why = read_shown([file], columns)
        bad |= why
        tables.append(keep_usable(table))
        held += len(tables[-1])
        unusable += len(table) - len(tables[-1])
        if held >= most:
            tables = [_newest(pa.concat_tables(tables))]
            held = len(tables[0])
            most = 2 * held + MANY_ROWS
    if unusable:
        print(f"{unusable} rows lack one of {', '.join(IDENTITY)} and are left out", file=sys.stderr)
    return _newest(pa.concat_tables(tables)), [f"{path}: {reason}; skipped" for path, reason in bad.items()]


def _newest(table: pa.Table) -> pa.Table:
    """The newest rows of chosen problems, and those of drawn ones: neither takes the place of the other."""
    chosen = pc.is_null(table["drawn"])
    return pa.concat_tables([newest_in_any_regime(table.filter(of)) for of in (chosen, pc.invert(chosen))])


def _to_choose_by(columns: Iterable[str]) -> list[str]:
    """The columns, and those that `load` needs to choose rows and to compute the rates of old rows."""
    asked = list(columns)
    old_rates = [f"{regime}_tflops" for regime in REGIMES if f"{regime}_rate" in asked]
    return list(dict.fromkeys([*asked, *SPEEDUPS, *WAITED, "guarantee", "drawn", *old_rates]))


def select_columns(table: pa.Table, columns: Iterable[str]) -> pa.Table:
    """The part of a table from `load` that these columns need. Other columns would cost time and could change which rows
    count as the newest."""
    return table.select([*_to_choose_by(columns), "host_bound"])


def keep_usable(table: pa.Table) -> pa.Table:
    """The rows that say what ran and what became of it, old ones with their metric and rates, and `host_bound`; a row without
    a device keeps a place of its own."""
    if any(table[name].null_count for name in IDENTITY):  # rare, and a filter is a copy
        table = table.filter(functools.reduce(pc.and_, (pc.is_valid(table[name]) for name in IDENTITY)))
    devices = pc.fill_null(table["device"], "unknown device")
    table = table.append_column("host_bound", find_host_bound(table))
    return with_rates(table.set_column(table.column_names.index("device"), "device", devices))


def find_host_bound(table: pa.Table) -> pa.ChunkedArray:
    """Of which rows the cold times of kernel or baseline contain the host's time, for which the GPU waited: by the shares of
    their windows, and in rows that are older than these columns by `flags`. A judge's block contains none."""
    late = pc.max_element_wise(table["cold_late"], table["cold_baseline_late"])
    flagged = pc.match_substring(pc.fill_null(table["flags"], ""), store.HOST_BOUND)
    waited = pc.if_else(pc.is_valid(late), pc.fill_null(pc.greater(late, MOST_LATE), False), flagged)
    return pc.and_(waited, pc.invert(are_judged(table)))


def kernel_order(row: store.Row) -> tuple[object, ...]:
    """The ladder: PyTorch, the numbered versions, then the others."""
    name = row["kernel"]
    return name != REFERENCE, not re.match("v[0-9]", name), natural(name), row["case"]


def metric_of(rows: Iterable[store.Row]) -> str:
    """The unit that throughputs are shown in, where rows of different ages disagree: that of the newest."""
    return max(rows, key=lambda row: str(row["finished"] or ""))["metric"]


def choose_problems(table: pa.Table) -> tuple[list[str], str | None]:
    """The problems in order, and the one that represents all."""
    measured = pc.is_in(table["status"], pa.array(store.MEASURED)).cast(pa.int64())
    groups = table.append_column("measured", measured).group_by("problem")
    totals = groups.aggregate([("measured", "sum"), ("flops", "max"), ("bytes", "max")])
    problems = totals.rename_columns([name.removesuffix("_sum").removesuffix("_max") for name in totals.column_names])
    rows = problems.to_pylist()
    return sorted((row["problem"] for row in rows), key=by_parts), representative_problem(rows)


def with_problem(table: pa.Table) -> pa.Table:
    """The newest row of each case on each device, cold and steady each the newest of its regime, with a column `problem`:
    the case's key without op and kernel."""
    table = newest_of_each_regime(table)
    return table.append_column("problem", pc.replace_substring_regex(table["case"], "^[^/]*/[^/]*/", ""))


def on_one_clock(table: pa.Table) -> pa.Table:
    """Rows `with_problem`, with times and rates as if all kernels of a problem had been timed at one moment.

    They were not, and between two the card's clock changes by up to 10 %. Their speed-ups are ratios to a baseline that
    was timed beside each. So a kernel's time is that baseline's, the median of what it took beside all of them, over the
    speed-up; its percentiles and rates change by the same factor. Rows that were judged have a clock of their own. Rows without
    these figures stay as they are, and so does a row whose baseline took a time that no clock explains (`MOST_DRIFT`), or whose
    cold time is `host_bound`: a kernel that waits for the GPU empties its queue, so that the baseline's launches come late and
    the baseline looks slow."""
    for regime in REGIMES:
        if {"baseline", "device", "op", *(f"{regime}_{name}" for name in ("us", "baseline_us", "speedup"))} <= set(
            table.column_names
        ):
            table = _on_one_clock(table, regime)
    return table


def _on_one_clock(table: pa.Table, regime: str) -> pa.Table:
    us, beside, speedup = (
        pc.fill_null(table[f"{regime}_{name}"].cast(pa.float64()), math.nan).to_numpy()
        for name in ("us", "baseline_us", "speedup")
    )
    own = pc.fill_null(pc.equal(table["kernel"], table["baseline"]), False)
    speedup = np.where(own.to_numpy(), 1.0, speedup)
    known = np.isfinite(us) & np.isfinite(beside) & np.isfinite(speedup) & (us > 0) & (beside > 0) & (speedup > 0)
    if regime == "cold" and "host_bound" in table.column_names:
        known &= ~table["host_bound"].to_numpy()
    of = [codes(table[name]) for name in ("device", "op", "problem", "baseline")]
    groups = np.stack([*of, are_judged(table).to_numpy()])
    order = np.lexsort([beside, *groups])
    order = order[known[order]]
    begins = np.flatnonzero(np.any(np.diff(groups[:, order], axis=1, prepend=-2), axis=0))
    counts = np.diff(begins, append=len(order))  # of each problem's rows, in the order of their baseline's time
    middle = (beside[order[begins + (counts - 1) // 2]] + beside[order[begins + counts // 2]]) / 2
    factor = np.ones(len(table))
    middle = np.repeat(middle, counts)
    clock = np.maximum(middle / beside[order], beside[order] / middle) < MOST_DRIFT
    factor[order] = np.where(clock, middle / speedup[order] / us[order], 1.0)
    times, rates = ("us", "p10_us", "p90_us"), ("rate", "tflops", "gbps", "percent_of_peak")
    for name, power in (*((name, 1) for name in times), *((name, -1) for name in rates)):
        if (column := f"{regime}_{name}") in table.column_names:
            scaled = pc.multiply(table[column], pa.array(factor**power))
            table = table.set_column(table.column_names.index(column), column, scaled)
    return table


def sections(table: pa.Table) -> list[tuple[str, str]]:
    """Every op and device, in the order in which they are shown: by op, GPUs first."""
    groups: list[dict[str, Any]] = table.group_by(["op", "device"]).aggregate([("device_kind", "max")]).to_pylist()
    groups.sort(key=lambda g: (g["op"], {"cuda": 0, "cpu": 1}.get(g["device_kind_max"], 2), g["device"]))
    return [(g["op"], g["device"]) for g in groups]


def lead(table: pa.Table) -> tuple[str, str] | None:
    """The op and device that stand for all in the README: the primary device, and the op with most cases there."""
    first = next(iter(primary(table)), None)
    counted = table.filter(pc.equal(table["device"], first)).group_by("op").aggregate([CASES]).to_pylist()
    best = min(counted, key=lambda g: (-g["case_count_distinct"], g["op"]), default=None)
    return (best["op"], str(first)) if best else None


def primary(table: pa.Table) -> list[str]:
    """All devices: GPUs first, of these the one with most cases."""
    counted = table.group_by("device").aggregate([("device_kind", "max"), CASES]).to_pylist()
    counted.sort(key=lambda g: (g["device_kind_max"] != "cuda", -g["case_count_distinct"], g["device"]))
    return [g["device"] for g in counted]
