"""Times and rates as the tables show them that no kernel can reach on the device that its row was measured on."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from minfer.analysis.data.prepare import WHICH, on_one_clock, with_problem
from minfer.rows import store
from minfer.rows.problems import number
from minfer.rows.rules import HEADROOM, REGIMES

COLUMNS = [*WHICH, "device", "baseline", "peaks", "roof", "floor_us"]
COLUMNS += [f"{regime}_{name}" for regime in REGIMES for name in ("us", "baseline_us", "speedup")]
COLUMNS += ["cold_gbps", "cold_tflops", "metric", "flops", "bytes"]


def check_roofs(table: pa.Table) -> tuple[list[str], int]:
    """A sentence for each figure that is beyond what its row's floor and peaks allow, and how many rows were looked at.

    Rates are compared cold only: steady calls may find inputs in the cache."""
    table = on_one_clock(with_problem(table))
    rows = table.filter(pc.is_in(table["status"], pa.array(store.MEASURED))).to_pylist(maps_as_pydicts="lossy")
    known = [row for row in rows if row["peaks"]]
    return [said for row in known for said in _check_row(row)], len(known)


def _check_row(row: store.Row) -> Iterator[str]:
    where = f"{row['device']}, {row['case']}"
    floor = number(row, "floor_us")
    for regime in REGIMES:
        us = number(row, f"{regime}_us")
        if us and floor and us < floor:
            yield f"{where}: the {regime} time of {us:.4g} µs is below its floor of {floor:.4g} µs"
    for name, unit, limit in (("cold_gbps", "GB/s", _bandwidth(row["peaks"])), ("cold_tflops", "TFLOP/s", _rate(row))):
        rate = number(row, name)
        if rate and limit and rate > HEADROOM * limit:
            yield f"{where}: {rate:.4g} {unit} is more than the measured peak of {limit:.4g} {unit} allows"


def _bandwidth(peaks: dict[str, float]) -> float:
    return max((peaks.get(name) or 0.0 for name in ("copy_gbps", "read_gbps")), default=0.0)


def _rate(row: store.Row) -> float | None:
    """The peak of the row's arithmetic at the device's highest clock: a probe runs at the one that its power limit leaves."""
    peaks, roof = row["peaks"], row["roof"]
    if not roof or roof.endswith("_gbps") or not peaks.get(roof):
        return None
    fastest, seen = peaks.get("max_sm_mhz"), peaks.get(f"{roof}_mhz")
    return float(peaks[roof] * max(1.0, fastest / seen)) if fastest and seen else None
