"""The figures of the report's page, by the same functions as the README's tables: the newest row of each case on one clock,
shares of one peak, paired ratios with their intervals, and ties."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minfer.analysis.data.peaks import best_peaks, under_one_peak
from minfer.analysis.data.prepare import (
    REFERENCE,
    choose_problems,
    kernel_order,
    metric_of,
    on_one_clock,
    sections,
    with_problem,
)
from minfer.analysis.plots.roofline import flat_roofs
from minfer.analysis.plots.series import equal_axes, name_axes, series, setting
from minfer.analysis.plots.style import look
from minfer.analysis.tables.problem import fastest, interval, provenance, regime_time
from minfer.rows import store
from minfer.rows.problems import number
from minfer.rows.rules import ABOVE_ROOF, REGIMES, is_above_roof, is_too_wide
from minfer.rows.store import Row

TEXTS: tuple[str, ...] = (
    "op",
    "kernel",
    "backend",
    "device",
    "status",
    "metric",
    "baseline",
    "cold_verdict",
    "steady_verdict",
)
TEXTS += ("message", "flags", "throttle", "guarantee", "timing", "run", "commit", "driver", "torch", "node")
NUMBERS: tuple[str, ...] = tuple(
    f"{regime}_{name}" for regime in REGIMES for name in ("us", "rate", "speedup", "speedup_low", "speedup_high")
)
NUMBERS += ("cold_percent_of_peak", "cold_tflops", "cold_rounds", "flops", "bytes", "error_over_bound", "rel_l2_error")
NUMBERS += ("registers", "shared_bytes", "local_bytes", "workspace_bytes", "launches", "build_s", "sm_mhz", "power_w")
NUMBERS += ("energy_gain",)
MORE: tuple[str, ...] = (
    "case",
    "finished",
    "device_kind",
    "arch",
    "roof",
    "operands",
    "shape",
    "cold_baseline_us",
    "steady_baseline_us",
    "cold_late",
    "cold_baseline_late",
)
MORE += ("steady_tflops", "cold_p10_us", "cold_p90_us", "steady_p10_us", "steady_p90_us")
COLUMNS = (*TEXTS, *NUMBERS, *MORE)  # of every row; peaks, metrics and functions are read of the newest only

PLACE = ("device", "dtype", "params")


def split(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The newest row of each case on each device, cold and steady each the newest of its regime, on one clock; and all older
    rows, as they were measured. Both have a column `problem`, and `place`, their row's in the table."""
    table = table.append_column("place", pa.array(np.arange(len(table))))
    newest = with_problem(table)
    older = table.filter(pc.invert(pc.is_in(table["place"], newest["place"].combine_chunks())))
    older = older.append_column("problem", pc.replace_substring_regex(older["case"], "^[^/]*/[^/]*/", ""))
    return on_one_clock(newest), older


def add_shares(rows: list[Row]) -> list[Row]:
    """The rows in ladder order, those of each device as shares of the best peaks that its measured rows have."""
    groups: dict[tuple[str, str], list[Row]] = {}
    measured: dict[str, list[Row]] = {}
    for row in sorted(rows, key=kernel_order):
        groups.setdefault((row["op"], row["device"]), []).append(row)
        measured.setdefault(row["device"], []).extend([row] if row["status"] in store.MEASURED else [])
    best = {device: best_peaks(of) for device, of in measured.items()}
    return [
        flag_above_roof(row) for (_, device), group in groups.items() for row in under_one_peak(group, best[device])
    ]


def flag_above_roof(row: Row) -> Row:
    """The row, with one more flag where it is above its roof."""
    if not is_above_roof(row["cold_percent_of_peak"]):
        return row
    return row | {"flags": "; ".join(filter(None, [row["flags"], ABOVE_ROOF]))}


def columns(rows: list[Row]) -> dict[str, Any]:
    """What the page's table of all rows has. A ratio whose interval is too wide is left out; its verdict stays."""
    found: dict[str, Any] = {name: [row[name] for row in rows] for name in TEXTS}
    parts = [[*row["problem"].split("/"), "", ""][:3] for row in rows]
    found |= {name: [part[index] for part in parts] for index, name in enumerate(("dtype", "params", "shape"))}
    found |= {name: _array(row[name] for row in rows) for name in NUMBERS}
    for regime in REGIMES:
        wide = np.array(
            [is_too_wide(*(row[f"{regime}_speedup_{end}"] for end in ("low", "high"))) for row in rows], bool
        )
        for end in ("", "_low", "_high"):
            found[f"{regime}_speedup{end}"][wide] = math.nan
    found["dram_bytes"] = _array((row["metrics"] or {}).get("ncu.dram_bytes") for row in rows)
    found["steady_run"] = [row.get("steady_run", row["run"]) for row in rows]
    found["finished"] = _array(row["finished"] and row["finished"].timestamp() * 1000 // 1 for row in rows)
    found["newest"] = _array(float(row["newest"]) for row in rows)
    return found


def _array(values: Iterable[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def leaders(rows: list[Row]) -> dict[str, Any]:
    """The fastest kernel of each problem on each device: a line of the leaderboard each."""
    problems: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        problems.setdefault((row["op"], row["device"], row["problem"]), []).append(row)
    lines = [line for of in problems.values() if (line := _leader(of))]
    lines.sort(key=lambda line: (line["op"], line["kind"] != "cuda", *(line[n] for n in PLACE), line["work"] or 0))
    found: dict[str, Any] = {}
    for name in lines[0] if lines else ():
        values = [line[name] for line in lines]
        texts = any(isinstance(value, str) for value in values)
        found[name] = values if texts else _array(values)
    return found


def _leader(rows: list[Row]) -> Row | None:
    """The fastest kernel when called cold, with the figures of both regimes; None where no kernel was timed."""
    best = fastest(rows, "cold")
    if not best:
        return None
    timed = [row for row in rows if row["kernel"] in best]
    row = min(timed, key=lambda row: float(row["cold_us"]))
    reference = next((row for row in rows if row["kernel"] == REFERENCE and regime_time(row, "cold")), None)
    dtype, params, shape = [*row["problem"].split("/"), "", ""][:3]
    line: Row = {"op": row["op"], "device": row["device"], "dtype": dtype, "params": params, "shape": shape}
    line |= {"kind": row["device_kind"] or ""}
    line |= {"kernel": row["kernel"], "ties": ", ".join(name for name in best if name != row["kernel"]) or ""}
    line |= {"metric": row["metric"], "cold_us": row["cold_us"], "cold_rate": row["cold_rate"], "status": row["status"]}
    line |= {"flags": row["flags"] or ""}
    line |= {"cold_percent_of_peak": row["cold_percent_of_peak"], "work": row["flops"] or row["bytes"]}
    for regime in REGIMES:
        line |= {f"{regime}{end}": value for end, value in _share(row, regime, reference).items()}
    return line


def _share(row: Row, regime: str, reference: Row | None) -> Row:
    """Of PyTorch's throughput, in percent, with the interval and the verdict, as `analysis.tables.percent` writes it."""
    none = {"": None, "_low": None, "_high": None, "_verdict": ""}
    if row["kernel"] == REFERENCE:
        return none | {"": 100.0, "_verdict": "PyTorch"}
    if row["baseline"] == REFERENCE and (ratio := number(row, f"{regime}_speedup")):
        low, high = (100 * end for end in interval(row, regime))
        if is_too_wide(low, high):
            return none | {"_verdict": row[f"{regime}_verdict"] or "unknown"}
        return {"": 100 * ratio, "_low": low, "_high": high, "_verdict": row[f"{regime}_verdict"] or ""}
    if reference and (theirs := number(reference, f"{regime}_us")) and (ours := number(row, f"{regime}_us")):
        return none | {"": 100 * theirs / ours}
    return none


def about(table: pa.Table, rows: list[Row]) -> list[dict[str, Any]]:
    """What is said of each op on each device: where its figures come from, its representative problem, and for each dtype
    and parameters the roofs and the series of sizes that plots begin with."""
    found = []
    for op, device in sections(table):
        here = table.filter(pc.and_(pc.equal(table["op"], op), pc.equal(table["device"], device)))
        supported = here.filter(pc.not_equal(here["status"], "unsupported"))
        of = [row for row in rows if (row["op"], row["device"]) == (op, device)]
        measured = [row for row in of if row["status"] in store.MEASURED]
        settings: dict[str, list[Row]] = {}
        for row in measured:
            settings.setdefault(setting(row), []).append(row)
        said: dict[str, Any] = {"op": op, "device": device, "origin": provenance(here)}
        said["metric"] = metric_of(measured) if measured else ""
        said["problem"] = choose_problems(supported.select(["problem", "status", "flops", "bytes"]))[1] or ""
        said["settings"] = [_setting(name, theirs) for name, theirs in settings.items()]
        found.append(said)
    return found


def _setting(name: str, rows: list[Row]) -> dict[str, Any]:
    peaks = best_peaks(rows)
    flat = flat_roofs(rows, peaks)
    slanted = {kind: peaks[f"{kind}_gbps"] for kind in ("copy", "read") if f"{kind}_gbps" in peaks}
    line = series([row for row in rows if number(row, "cold_rate")])
    first = {"axis": line.axis, "label": line.label, "fixed": line.fixed, "square": line.square} if line else None
    together = [
        {"label": name_axes(group), "axes": group} for group in equal_axes([row for row in rows if row["shape"]])
    ]
    return {"name": name, "tflops": flat, "gbps": slanted, "series": first, "together": together}


def looks(kernels: Iterable[str]) -> Mapping[str, Any]:
    """The colour of each kernel, that of all plots, and its marker as Plotly calls it."""
    markers = {"o": "circle", "D": "diamond", "^": "triangle-up", "s": "square", "P": "cross", "v": "triangle-down"}
    markers |= {"X": "x", "*": "star"}
    return {kernel: [look(kernel).color, markers[look(kernel).marker]] for kernel in kernels}
