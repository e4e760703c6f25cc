"""What became of each case from one set of rows to another, from columns: ten million rows are read in seconds.

A kernel's speed-up over a baseline is a median of paired ratios, with a 95 % interval in its row. Two such medians of
different runs are independent, so that the half-widths of their logarithms add as squares (as standard errors do; the
interval that results covers the ratio of the two at least as often). Of steady calls a row has no confidence interval but the
range over neighbouring blocks, so there the half-widths add. A time without a common baseline has the interval of
the median of its samples, from order statistics (David and Nagaraja, Order Statistics, section 7.1).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minfer.rows import store
from minfer.rows.rules import LEAST_GAIN
from minfer.rows.select import codes, is_judged, newest, read_shown

WORSE, BETTER = ("broken", "slower"), ("faster", "fixed")
FAILED = "failed in both"
UNLIKE = "one was judged, the other not"
PAIRED, UNPAIRED, OWN = "through {baseline}", "unpaired times", "the baseline itself: unpaired times"
RATIO = ("speedup", "speedup_low", "speedup_high", "aa_spread")


@dataclass(frozen=True)
class Compared:
    """A case in both sets: the ratio of its times, A's over B's, and what that means."""

    case: str
    device: str
    statuses: tuple[str, str]
    messages: tuple[str, str]
    us: tuple[float | None, float | None]
    ratio: float | None
    low: float | None
    high: float | None
    verdict: str  # faster, tie, slower, broken, fixed, FAILED, or unknown where there is no interval
    how: str

    @property
    def rank(self) -> tuple[int, float]:
        """The worst first."""
        order = (*WORSE, "unknown", *BETTER, FAILED, "tie")
        return order.index(self.verdict), self.ratio or 0.0

    @property
    def changed(self) -> bool:
        """Whether there is something to look at: not where it is a tie, or failed in both in the same way."""
        return self.verdict != "tie" and not (self.verdict == FAILED and self.statuses[0] == self.statuses[1])

    def fails(self, limit: float) -> bool:
        """Whether it no longer works, or is slower by more than `limit` with its whole interval. A baseline's own time is no
        kernel's fault."""
        if self.verdict == "broken":
            return True
        return self.verdict == "slower" and self.how != OWN and self.high is not None and 1 / self.high > 1 + limit


@dataclass(frozen=True)
class Found:
    """The cases that both sets have, how many rows are of cases that only one has, and what is wrong with each file that could
    not be read."""

    cases: list[Compared]
    only_a: int
    only_b: int
    bad: dict[Path, str]


def compare(a: list[Path], b: list[Path], regime: str) -> Found:
    """Compare the newest rows for a regime of each case and device of two sets of parquet files."""
    columns = ["case", "device", "run", "finished", "kernel", "status", "message", "baseline", "guarantee"]
    columns += [f"{regime}_{name}" for name in ("us", *RATIO)]
    small, large = sorted((a, b), key=lambda files: sum(file.stat().st_size for file in files))
    found: dict[int, pa.Table] = {}
    bad: dict[Path, str] = {}
    found[id(small)], _ = _newest(small, columns, None, regime, bad)
    found[id(large)], other_rows = _newest(large, columns, found[id(small)]["key"], regime, bad)
    sides = [found[id(files)] for files in (a, b)]
    numbers = codes(pa.chunked_array([chunk for side in sides for chunk in side["key"].chunks], pa.string()))
    first, second = numbers[: len(sides[0])], numbers[len(sides[0]) :]
    _, left, right = np.intersect1d(first, second, assume_unique=True, return_indices=True)
    common = [side.take(pa.array(places)) for side, places in zip(sides, (left, right), strict=True)]
    only_a, only_b = (
        len(side) - len(left) + (other_rows if files is large else 0) for side, files in zip(sides, (a, b), strict=True)
    )
    rows = [side.drop_columns(["key", "run", "finished"]).to_pylist() for side in common]
    alone = pc.invert(_find_paired(common[0], common[1], regime))
    times = [_intervals(files, side.filter(alone), regime) for files, side in zip((a, b), common, strict=True)]
    cases = []
    for one, other, key in zip(*rows, common[0]["key"].to_pylist(), strict=True):
        if "unsupported" not in (one["status"], other["status"]):
            cases.append(_compare_case(one, other, regime, *(side.get(key) for side in times)))
    return Found(cases, only_a, only_b, bad)


def _find_paired(one: pa.Table, other: pa.Table, regime: str) -> pa.ChunkedArray:
    """Which cases have a speed-up over the same baseline in both."""
    same = pc.equal(one["baseline"], other["baseline"])
    paired = pc.and_(same, pc.not_equal(one["kernel"], one["baseline"]))
    for side in (one, other):
        paired = pc.and_(paired, pc.is_valid(side[f"{regime}_speedup"]))
    return pc.fill_null(paired, False)


def _newest(
    files: list[Path], columns: list[str], wanted: pa.ChunkedArray | None, regime: str, bad: dict[Path, str]
) -> tuple[pa.Table, int]:
    """The newest rows for a regime of the wanted cases and devices, or of all, with their `key`; and how many rows were not
    wanted. Adds to `bad` what is wrong with each file that cannot be read.

    One file at a time: of ten million rows, those of a night's run fit into memory."""
    kept, others = [], 0
    keys = wanted.combine_chunks() if wanted is not None else None
    for file in files:
        table, wrong = read_shown([file], columns)
        bad |= wrong
        table = table.filter(pc.and_(pc.is_valid(table["case"]), pc.is_valid(table["status"])))
        device = pc.fill_null(table["device"], "unknown device")
        table = table.set_column(table.column_names.index("device"), "device", device)
        table = table.append_column("key", pc.binary_join_element_wise(table["case"], table["device"], "\n"))
        if keys is not None:
            found = table.filter(pc.is_in(table["key"], keys))
            others, table = others + len(table) - len(found), found
        kept.append(table)
    return newest(pa.concat_tables(kept), regime), others


Interval = tuple[float, float, float]  # of logarithms: the value, and the two ends' distances from it


def _intervals(files: Iterable[Path], side: pa.Table, regime: str) -> dict[str, Interval]:
    """The median cold time of each measured case, by its key."""
    wanted = side.filter(pc.is_in(side["status"], pa.array(store.MEASURED)))
    if not len(wanted) or regime != "cold":  # a steady time is a mean of blocks, and has no interval of its own
        return {}
    cases, runs = wanted["case"].combine_chunks(), set(wanted["run"].to_pylist())
    newest_runs = dict(zip(wanted["key"].to_pylist(), wanted["run"].to_pylist(), strict=True))
    found = {}
    for file in files:  # one at a time: samples are large
        table, _ = read_shown([file], ["case", "device", "run", "cold_samples_us"])
        if not runs.intersection(pc.unique(table["run"]).to_pylist()):
            continue
        for row in table.filter(pc.is_in(table["case"], cases)).to_pylist():
            key = f"{row['case']}\n{row['device'] or 'unknown device'}"
            if row["cold_samples_us"] and newest_runs.get(key) == row["run"]:
                found[key] = median_interval(np.log(row["cold_samples_us"]))
    return found


def median_interval(samples: np.ndarray) -> Interval:
    """The median of independent samples, and how far a 95 % confidence interval of it reaches down and up."""
    ordered, n = np.sort(samples), len(samples)
    tail, rank = 0.0, 0
    for rank in range(n // 2):
        tail += math.exp(math.lgamma(n + 1) - math.lgamma(rank + 1) - math.lgamma(n - rank + 1) - n * math.log(2))
        if tail > 0.025:
            break
    middle, rank = float(np.median(ordered)), max(rank - 1, 0)
    return middle, middle - float(ordered[rank]), float(ordered[n - 1 - rank]) - middle


def _compare_case(one: store.Row, other: store.Row, regime: str, *times: Interval | None) -> Compared:
    pair = (one, other)
    worked = [row["status"] in store.MEASURED for row in pair]
    case = {
        "case": one["case"],
        "device": one["device"],
        "statuses": tuple(row["status"] for row in pair),
        "messages": tuple(row["message"] or "" for row in pair),
        "us": tuple(row[f"{regime}_us"] if worked[index] else None for index, row in enumerate(pair)),
    }
    if not all(worked):
        verdict = "broken" if worked[0] else "fixed" if worked[1] else FAILED
        return Compared(**case, ratio=None, low=None, high=None, verdict=verdict, how="status")
    if is_judged(one) != is_judged(other):  # times of blocks of calls, and of single cold calls
        return Compared(**case, ratio=None, low=None, high=None, verdict="unknown", how=UNLIKE)
    paired = [_speedup(row, regime) for row in pair]
    same = one["baseline"] is not None and one["baseline"] == other["baseline"]
    own = same and one["kernel"] == one["baseline"]
    if same and not own and paired[0] and paired[1]:
        how, (a, b) = PAIRED.format(baseline=one["baseline"]), (paired[0], paired[1])
        spread = max(row[f"{regime}_aa_spread"] or 0.0 for row in pair)
    elif times[0] and times[1]:
        how, spread = OWN if own else UNPAIRED, 0.0
        a, b = (_reciprocal(time) for time in times)
    else:
        us = case["us"]
        ratio = us[0] / us[1] if us[0] and us[1] else None
        return Compared(**case, ratio=ratio, low=None, high=None, verdict="unknown", how=OWN if own else UNPAIRED)
    found = quotient(b, a, regime, spread)
    return Compared(**case, ratio=found.value, low=found.low, high=found.high, verdict=found.verdict, how=how)


@dataclass(frozen=True)
class Ratio:
    """A ratio of two speeds with its interval; `faster` and `slower` say that the whole interval is beyond 1."""

    value: float
    low: float
    high: float
    verdict: str


def quotient(over: Interval, under: Interval, regime: str, spread: float) -> Ratio:
    """The ratio of two independent ratios. A difference is a tie where it is less than `LEAST_GAIN` or than `spread`, which is
    how far the baseline was from its own duplicate."""
    middle, add = over[0] - under[0], math.hypot if regime == "cold" else operator.add
    low, high = middle - add(over[1], under[2]), middle + add(over[2], under[1])
    needed = math.log1p(max(LEAST_GAIN, spread))
    verdict = "faster" if low > needed else "slower" if high < -needed else "tie"
    return Ratio(math.exp(middle), math.exp(low), math.exp(high), verdict)


def through_baseline(row: store.Row, other: store.Row, regime: str) -> Ratio | None:
    """How fast a kernel is relative to another, from the ratio of each to one baseline; None where a row lacks it, or where
    they were not timed beside the same baseline of the same PyTorch."""
    if row["baseline"] != other["baseline"] or row["torch"] != other["torch"]:
        return None
    speeds = _speedup(row, regime), _speedup(other, regime)
    if speeds[0] is None or speeds[1] is None:
        return None
    return quotient(speeds[0], speeds[1], regime, max(each[f"{regime}_aa_spread"] or 0.0 for each in (row, other)))


def _speedup(row: store.Row, regime: str) -> Interval | None:
    if row["kernel"] == row["baseline"]:
        return 0.0, 0.0, 0.0
    values = [row[f"{regime}_{name}"] for name in RATIO[:3]]
    if not all(value is not None and 0 < value < math.inf for value in values):
        return None
    middle, low, high = (math.log(value) for value in values)
    return middle, middle - low, high - middle


def _reciprocal(time: Interval | None) -> Interval:
    """Of a time, as a rate."""
    assert time is not None
    return -time[0], time[2], time[1]


def junit(name: str, cases: list[Compared], failed: list[Compared] | None) -> str:
    """The cases as JUnit XML, as CI servers read it. `failed`: the cases that `--fail-over` fails; None: the broken ones."""
    failed = [case for case in cases if case.fails(math.inf)] if failed is None else failed
    suite = ElementTree.Element(
        "testsuite", name=f"minfer compare {name}", tests=str(len(cases)), failures=str(len(failed))
    )
    for case in cases:
        about = {"classname": f"{case.device}.{case.case.partition('/')[0]}", "name": case.case}
        about |= {"time": f"{case.us[1] * 1e-6:.9f}"} if case.us[1] else {}
        element = ElementTree.SubElement(
            suite, "testcase", {key: _replace_unprintable(text) for key, text in about.items()}
        )
        said = (
            f"{case.verdict}: {case.ratio:.4f} ({case.low:.4f} to {case.high:.4f}), {case.how}"
            if case.low
            else case.verdict
        )
        if case.verdict in ("broken", FAILED):
            before = f"{case.statuses[0]}, then " if case.verdict == FAILED and case.changed else ""
            said += f": {before}{case.statuses[1]}: {case.messages[1]}"
        if case in failed:
            ElementTree.SubElement(element, "failure", message=_replace_unprintable(said), type=case.verdict)
        else:
            ElementTree.SubElement(element, "system-out").text = _replace_unprintable(said)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _replace_unprintable(text: str) -> str:
    """Without the control characters that XML has no way to write."""
    return "".join(c if c.isprintable() or c in "\t\n" else " " for c in text)
