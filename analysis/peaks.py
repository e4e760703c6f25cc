"""One set of peaks for rows of many runs, each of which measured its own.

Two runs see peaks that differ by a few percent: the card was warmer, or a probe has got better. A kernel could then reach
98 % of a peak and still stand above the line that a plot draws for it. So all rows that are shown together have the best
that any of them measured; each row keeps its own in its parquet file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from analysis.rows import number
from minfer.rows.store import Row

Peaks = dict[str, float]


def under_one_peak(rows: list[Row]) -> list[Row]:
    """The same rows, each with the best peaks of all, and its share of the peak that bounds it changed accordingly."""
    best = best_peaks(rows)
    return [row | {"peaks": best} | _share(row, best) if row["peaks"] else row for row in rows]


def best_peaks(rows: Iterable[Row]) -> Peaks:
    """The largest of each peak, with the clock that it was seen at."""
    best: Peaks = {}
    for row in rows:
        for name, value in (row["peaks"] or {}).items():
            clock = _clock(name)
            if name.endswith("_mhz") or not value or not 0 < value < math.inf or value <= best.get(name, 0.0):
                continue
            best[name] = value
            best.pop(clock, None)
            if mhz := row["peaks"].get(clock):
                best[clock] = mhz
    return best


def _clock(name: str) -> str:
    return f"{name.removesuffix('_gbps')}_mhz"


def _share(row: Row, best: Peaks) -> Row:
    share, bound = number(row, "cold_percent_of_peak"), row["roof"] or _bound(row)
    if share is None or bound is None or bound not in row["peaks"]:
        return {}
    return {"cold_percent_of_peak": share * row["peaks"][bound] / best[bound]}


def _bound(row: Row) -> str | None:
    """The peak that a row's share is of, where the row is older than the column that says so: the one that gives it."""
    share, us = number(row, "cold_percent_of_peak"), number(row, "cold_us")
    if share is None or us is None:
        return None
    for name, value in row["peaks"].items():
        if value and not name.endswith("_mhz"):
            work = (
                (number(row, "bytes") or 0.0) / 1e3 if name.endswith("_gbps") else (number(row, "flops") or 0.0) / 1e6
            )
            if math.isclose(100 * work / value / us, share, rel_tol=1e-6):
                return str(name)
    return None
