"""One set of peaks for all rows of a device, and the share of them that each row reaches.

Two runs see peaks that differ by a few percent: the card was warmer, or a probe has got better. A kernel could then reach
98 % of a peak and still stand above the line that a plot draws for it. So all rows of a device have the best that any of
them measured; each row keeps its own in its parquet file. A row's share is computed again from the best peaks, by the rule of
`minfer.bench.peaks`, so that old and new rows have the same roof (`limits`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from minfer.rows.problems import number
from minfer.rows.roofs import copy_rate
from minfer.rows.select import TFLOPS
from minfer.rows.store import Row

Peaks = dict[str, float]
BITS = {"float64": 64, "int64": 64, "float32": 32, "int32": 32, "float16": 16, "bfloat16": 16}  # of others, 8
OPERAND = re.compile(r"[^ ]+ (in|out|inout) ([a-z0-9_]+) \(([0-9, ]*)\)")


def under_one_peak(rows: list[Row], best: Peaks | None = None) -> list[Row]:
    """The same rows of one device. Each gets the best peaks of all of them, or `best` from more rows of the device, and its
    share of what these allow. Its `roof` is the peak that bounds it under the peaks of its own run."""
    best = best_peaks(rows) if best is None else best
    allowed = limits(rows, best)
    return [row | {"peaks": best, "roof": bound(row)} | _share(row, allowed) if row["peaks"] else row for row in rows]


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


def limits(rows: Iterable[Row], best: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """The least microseconds that the peaks allow for each problem of an op, by op and problem.

    Memory reads faster than it copies, so what is read beyond what is written counts at the peak of reading. FLOPs bound
    only an op that is measured in FLOPs. An op that is measured in bytes may need fewer operations than are counted, by a
    closed form, so only memory is its roof."""
    problems: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        problems.setdefault(_where(row), []).append(row)
    return {where: limit for where, of in problems.items() if (limit := max(_memory(of, best), _arithmetic(of, best)))}


def _where(row: Row) -> tuple[str, str]:
    return row["op"], row.get("problem") or row["case"].split("/", 2)[-1]


def _memory(rows: list[Row], best: Mapping[str, float]) -> float:
    """The microseconds that a problem's bytes take."""
    nbytes = max((number(row, "bytes") or 0.0 for row in rows), default=0.0)
    copy, read = copy_rate(best, nbytes), best.get("read_gbps", 0.0)
    if not (copy or read):
        return 0.0
    written = max((_written(row) for row in rows), default=0.0)  # 0 if no row says it: then all bytes count as read
    only_read = max(0.0, nbytes - 2 * written)
    return (nbytes - only_read) / (copy or read) / 1e3 + only_read / max(copy, read) / 1e3


def _written(row: Row) -> float:
    """The bytes of all tensors that are written."""
    found = OPERAND.findall(row.get("operands") or "")
    sizes = ((BITS.get(dtype, 8), shape.replace(" ", "").split(",")) for role, dtype, shape in found if role != "in")
    return sum(bits / 8 * math.prod(int(size) for size in shape if size) for bits, shape in sizes)


def _arithmetic(rows: list[Row], best: Mapping[str, float]) -> float:
    """The microseconds that a problem's FLOPs take at the fastest of the peaks that its rows name."""
    named = [best[name] for row in rows if row["metric"] == TFLOPS and (name := _rate(bound(row))) in best]
    flops = max((number(row, "flops") or 0.0 for row in rows), default=0.0)
    return flops / max(named) / 1e6 if named else 0.0


def _rate(name: str | None) -> str:
    """The name of a peak of arithmetic; nothing for one of memory."""
    return "" if name is None or name.endswith("_gbps") else name


def _clock(name: str) -> str:
    return f"{name.removesuffix('_gbps')}_mhz"


def _share(row: Row, allowed: Mapping[tuple[str, str], float]) -> Row:
    us, limit = number(row, "cold_us"), allowed.get(_where(row))
    known = us and limit and number(row, "cold_percent_of_peak")
    return {"cold_percent_of_peak": 100 * limit / us} if known and us and limit else {}


def bound(row: Row) -> str | None:
    """The peak that a row's share refers to: the one that it names or, if the row is older than that column, the peak that
    yields the share. None where a row has no share, as on a CPU."""
    share, us = number(row, "cold_percent_of_peak"), number(row, "cold_us")
    if row["roof"] or share is None or us is None:
        return str(row["roof"]) if row["roof"] else None
    for name, value in (row["peaks"] or {}).items():
        if value and not name.endswith("_mhz"):
            work = (
                (number(row, "bytes") or 0.0) / 1e3 if name.endswith("_gbps") else (number(row, "flops") or 0.0) / 1e6
            )
            if math.isclose(100 * work / value / us, share, rel_tol=1e-6):
                return str(name)
    return None
