"""The kernel to beat: the fastest of torch.compile and the libraries that were timed beside ours, where it beats PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

from minfer.analysis.data.prepare import REFERENCE
from minfer.analysis.data.verdicts import Ratio, through_baseline
from minfer.rows import store
from minfer.rows.problems import number
from minfer.rows.rules import MOST_DRIFT

LIBRARY = "torch"  # the backend of what is called from PyTorch: its own kernels, torch.compile, Liger, cuBLASLt


def best_other(rows: Iterable[store.Row], regime: str) -> store.Row | None:
    """Of the kernels of one problem that are not ours the fastest; None where that is `torch`, which all are compared with."""
    timed = [row for row in rows if row["backend"] == LIBRARY and row["status"] in store.MEASURED]
    best = max(timed, key=lambda row: _speedup(row, regime), default=None)
    return best if best and (_speedup(best, regime) > 1 or best["baseline"] != REFERENCE) else None


def _speedup(row: store.Row, regime: str) -> float:
    """Over the baseline; 0 where it is not known."""
    return 1.0 if row["kernel"] == row["baseline"] else number(row, f"{regime}_speedup") or 0.0


def compare_with_other(row: store.Row, other: store.Row | None, regime: str) -> Ratio | None:
    """How fast a kernel is relative to the best other, which it was not timed beside: through the baseline of both. None
    where the times of the baseline beside the two differ by `MOST_DRIFT` or more, or where a cold one is `host_bound`."""
    if other is None or row["kernel"] == other["kernel"] or row["status"] not in store.MEASURED:
        return None
    mine, theirs = (number(each, f"{regime}_baseline_us") for each in (row, other))
    if mine and theirs and max(mine, theirs) >= MOST_DRIFT * min(mine, theirs):
        return None
    if regime == "cold" and (row["host_bound"] or other["host_bound"]):
        return None
    return through_baseline(row, other, regime)


def verdict(row: store.Row, other: store.Row | None) -> str | None:
    """Whether a kernel is faster than whatever else was timed, tied or slower, cold."""
    ratio = compare_with_other(row, other, "cold")
    return ratio.verdict if ratio else row["cold_verdict"]
