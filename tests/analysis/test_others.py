"""The best other kernel: which it is, how far a kernel is from it, and that tables and README show it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minfer.analysis.checks import results
from minfer.analysis.data.others import best_other, compare_with_other
from minfer.analysis.makers.figures import check_pages
from minfer.rows import store
from tests.tables import MARKERS, Workspace, row


def timed(kernel: str, speedup: float, half_width: float = 0.0, **values: Any) -> store.Row:
    """A row that is so many times as fast as PyTorch, cold, give or take a relative half-width."""
    ends = {"cold_speedup_low": speedup / (1 + half_width), "cold_speedup_high": speedup * (1 + half_width)}
    made = row(kernel, 100 / speedup, cold_verdict="faster" if speedup > 1 else "slower", **ends)
    return dict.fromkeys(store.SCHEMA.names) | {"host_bound": False} | made | values


def measured(*rows: store.Row) -> list[store.Row]:
    """The rows as a file has them, without what is computed of them."""
    return [{name: each[name] for name in store.SCHEMA.names} for each in rows]


TORCH = timed("torch", 1.0, backend="torch")
LIGER = timed("liger", 1.25, 0.03, backend="torch")
OURS = timed("v02", 1.5, 0.04, backend="cuda")


def test_it_is_the_fastest_that_is_not_ours() -> None:
    slower = timed("torch_compile", 1.2, backend="torch")
    failed = timed("quack", 2.0, backend="torch", status="wrong")
    assert best_other([OURS, TORCH, slower, LIGER, failed], "cold") is LIGER


def test_there_is_none_where_nothing_beats_pytorch() -> None:
    assert best_other([OURS, TORCH, timed("liger", 0.9, backend="torch")], "cold") is None


def test_the_ratio_goes_through_the_baseline_and_its_interval_has_both() -> None:
    found = compare_with_other(OURS, LIGER, "cold")
    assert found is not None and found.value == pytest.approx(1.2) and found.verdict == "faster"
    assert found.high == pytest.approx(1.2 * math.exp(math.hypot(math.log(1.03), math.log(1.04))))
    assert found.low == pytest.approx(1.2 / math.exp(math.hypot(math.log(1.03), math.log(1.04))))
    torch = compare_with_other(TORCH, LIGER, "cold")
    assert torch is not None and torch.value == pytest.approx(0.8) and torch.high == pytest.approx(0.8 * 1.03)


def test_steady_ranges_add_at_their_extremes() -> None:
    ends = {"steady_speedup": 1.0, "steady_speedup_low": 0.98, "steady_speedup_high": 1.02}
    found = compare_with_other(OURS | ends, LIGER | ends, "steady")
    assert found is not None and (found.low, found.high) == pytest.approx((0.98 / 1.02, 1.02 / 0.98))
    assert found.verdict == "tie"


@pytest.mark.parametrize("different", [{"baseline": "torch_acc16"}, {"torch": "2.12.0"}])
def test_another_baseline_gives_no_ratio(different: dict[str, str]) -> None:
    assert compare_with_other(OURS | different, LIGER, "cold") is None


@pytest.mark.parametrize("waits", range(2))
def test_a_ratio_that_contains_the_hosts_time_gives_none(waits: int) -> None:
    pair = [OURS, LIGER]
    pair[waits] = pair[waits] | {"host_bound": True}
    ends = {"steady_speedup": 1.0, "steady_speedup_low": 0.98, "steady_speedup_high": 1.02}
    assert compare_with_other(*pair, "cold") is None
    assert (
        compare_with_other(*(each | ends for each in pair), "steady") is not None
    )  # a graph is replayed, without the host


def test_what_the_baseline_differs_from_itself_makes_a_tie() -> None:
    near = timed("v02", 1.28, 0.001, backend="cuda")
    exact = timed("liger", 1.25, 0.001, backend="torch")
    assert (found := compare_with_other(near, exact, "cold")) and found.verdict == "faster"
    assert (found := compare_with_other(near, exact | {"cold_aa_spread": 0.03}, "cold")) and found.verdict == "tie"


def test_a_table_has_it_beside_pytorch_and_the_readme_names_it(work: Workspace) -> None:
    work.readme.write_text(f"<!-- headline:begin -->\n<!-- headline:end -->\n{MARKERS}")
    rows = measured(TORCH, LIGER, OURS, timed("v01_naive", 0.5, backend="cuda"))
    work.write(*(each | {"steady_us": None, "steady_speedup": None} for each in rows))
    assert work.run() == 0
    header, *body = work.tables()[0]
    assert header[3:5] == ["% of PyTorch throughput", "% of liger"]
    shares = {cells[0].strip("*"): cells[4].strip("*").partition(" (")[0] for cells in body}
    assert shares == {"torch": "80.0 %", "liger": "100.0 %", "v01_naive": "40.0 %", "v02": "120.0 %"}
    assert "| 120.0 % (114.2–126.0) of liger | [1 faster](" in work.readme.read_text()
    whole, page = work.device_page(), work.op_pages()[0]
    ops = whole.read_text()
    assert "| 120.0 % (114.2–126.0), liger | 1 faster |" in ops
    assert check_pages([work.readme, whole, page])[0] == []
    whole.write_text(ops.replace("| 120.0 % (", "| 121.0 % ("))
    assert any("121.0 % (114.2–126.0) of liger" in said for said in results.check_ops_table(whole))
    text = page.read_text()
    assert any("of liger's time" in said for said in results.check_tables(text.replace("| 80.0 %", "| 81.0 %")))


def test_problems_are_counted_against_it(work: Workspace) -> None:
    ahead = timed("liger", 1.6, backend="torch")
    work.write(*measured(TORCH, ahead, OURS))
    assert work.run() == 0
    assert "[1 slower](" in work.readme.read_text()
