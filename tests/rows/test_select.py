"""If older rows are dropped while files are read, the newest rows and the tables are the same as without that."""

from __future__ import annotations

import datetime as dt
import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer.analysis.data import prepare as rows
from minfer.rows import store
from minfer.rows.select import newest_in_any_regime, newest_of_each_regime, read_shown
from tests.tables import NOON, row

TIME = st.none() | st.integers(1, 9).map(float)
METRICS = st.lists(st.tuples(st.sampled_from(["ncu.cycles", "static.sm_89.registers"]), st.just(1.0)), max_size=2)
COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "case": st.sampled_from(["op/a/x", "op/b/x"]),
    "device": st.sampled_from(["H200", "H100"]),
    "finished": st.none() | st.integers(0, 3).map(lambda hours: NOON + dt.timedelta(hours=hours)),
    "run": st.none() | st.sampled_from(["r1", "r2"]),
    "status": st.sampled_from(["ok", "unconverged", "crashed"]),
    "baseline": st.sampled_from(["torch", "v01"]),
    "cold_us": TIME,
    "steady_us": TIME,
    "metrics": st.none() | METRICS,
} | {f"{regime}_speedup{end}": TIME for regime in ("cold", "steady") for end in ("", "_low", "_high")}
TYPES = {"case": pa.string(), "device": pa.string(), "finished": pa.timestamp("us", "UTC"), "run": pa.string()}
TYPES |= {"status": pa.string(), "baseline": pa.string(), "metrics": store.SCHEMA.field("metrics").type}
SCHEMA = pa.schema([(name, TYPES.get(name, pa.float64())) for name in COLUMNS] + [("row", pa.int64())])


@settings(deadline=None)
@given(st.lists(st.fixed_dictionaries(COLUMNS), max_size=24), st.lists(st.integers(0, 24), max_size=4))
def test_the_newest_rows_are_those_of_all_when_the_older_are_dropped_part_by_part(
    made: list[dict[str, Any]], cuts: list[int]
) -> None:
    table = pa.Table.from_pylist([values | {"row": place} for place, values in enumerate(made)], SCHEMA)
    edges = sorted({0, *(cut for cut in cuts if cut < len(table)), len(table)})
    kept = SCHEMA.empty_table()
    for first, end in itertools.pairwise(edges):
        kept = newest_in_any_regime(pa.concat_tables([kept, table.slice(first, end - first)]))
    assert newest_of_each_regime(kept).equals(newest_of_each_regime(table))
    assert len(kept) <= 4 * len(newest_of_each_regime(table))


def test_older_rows_are_dropped_while_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [*rows.WHICH, "device", "device_kind", "cold_us", "steady_us"]
    for night in range(6):
        of = [row(kernel, 10.0 + night, run=f"r{night}", finished=NOON + dt.timedelta(days=night)) for kernel in "abc"]
        store.write(store.to_table(of), tmp_path / f"{night}.parquet")
    sizes: list[int] = []

    def counted(table: pa.Table) -> pa.Table:
        sizes.append(len(table))
        return newest_in_any_regime(table)

    monkeypatch.setattr(rows, "MANY_ROWS", 3)
    monkeypatch.setattr(rows, "newest_in_any_regime", counted)
    table, problems = rows.load([], tmp_path, wanted)
    assert not problems
    assert table["run"].to_pylist() == ["r5"] * 3
    assert max(sizes) <= 9  # of 18


def test_a_run_without_counters_hides_no_older_ones() -> None:
    times = [{"ncu.cycles": 1.0}, {"ncu.cycles": 2.0}, {"static.sm_89.registers": 32.0}, None]
    often = [row(run=f"r{i}", finished=NOON + dt.timedelta(days=i), metrics=found) for i, found in enumerate(times)]
    newest = newest_of_each_regime(store.to_table(often)).to_pylist(maps_as_pydicts="strict")
    assert [(each["run"], each["counted_run"], each["metrics"]) for each in newest] == [
        ("r3", "r1", {"ncu.cycles": 2.0})
    ]
    newest = newest_of_each_regime(store.to_table(often[3:])).to_pylist()
    assert [(each["counted_run"], each["metrics"]) for each in newest] == [("r3", None)]


def test_a_case_that_was_run_often_counts_once() -> None:
    """The H100 has more rows and the H200 more cases; on the H200, rope has more rows and hgemm more cases."""
    often = [row(device="H100", run=f"r{i}") for i in range(9)] + [row(op="rope", run=f"r{i}") for i in range(5)]
    table = rows.keep_usable(store.to_table([*often, row("v01"), row("v02")]))
    assert rows.primary(table) == ["NVIDIA H200", "H100"]
    assert rows.lead(table) == ("hgemm", "NVIDIA H200")


def test_of_a_judged_row_the_judges_figures_are_shown(tmp_path: Path) -> None:
    """What the kernel's own process measured is a hint, and nothing that is shown may be one."""
    outside = {"judged_us": 80.0, "judged_speedup": 1.25, "judged_samples_us": [79.0, 81.0], "judged_verdict": "faster"}
    judged = row(
        "theirs",
        50.0,
        cold_rounds=30,
        steady_joules=1.0,
        energy_gain=2.0,
        power_w=9.0,
        guarantee="judged, landlock",
        **outside,
    )
    failed = row("liar", 50.0, status="dishonest", guarantee="judged, landlock")
    ours = row("ours", 60.0, guarantee="in-process", cold_samples_us=[60.0], judged_us=1.0)
    store.write(store.to_table([judged, failed, ours, row("old", 70.0)]), tmp_path / "a.parquet")
    timed = [f"{regime}_{name}" for regime in ("cold", "steady") for name in ("us", "speedup", "verdict", "samples_us")]
    columns = ["kernel", "status", *timed, "cold_rounds", "steady_joules", "energy_gain", "power_w"]
    table, bad = read_shown([tmp_path / "a.parquet"], columns)
    assert not bad and table.column_names == columns
    found = {each.pop("kernel"): each for each in table.to_pylist()}
    assert found["theirs"] == dict.fromkeys(columns[1:]) | {
        "status": "ok", "cold_us": 80.0, "cold_speedup": 1.25, "cold_samples_us": [79.0, 81.0], "cold_verdict": "faster"
    }  # fmt: skip
    assert found["liar"] == dict.fromkeys(columns[1:]) | {"status": "dishonest"}
    assert found["ours"]["cold_us"] == found["ours"]["steady_us"] == 60.0 and found["ours"]["cold_samples_us"] == [60.0]
    assert found["old"]["cold_us"] == 70.0


def test_a_newer_judged_row_is_not_hidden_by_what_an_older_one_says_of_itself(tmp_path: Path) -> None:
    """Four blocks have a wide interval; and steady times of a process of its own are not joined to them."""
    ends = {"judged_us": 90.0, "judged_baseline_us": 100.0, "judged_speedup": 1.1}
    ends |= {"judged_speedup_low": 0.9, "judged_speedup_high": 1.4}
    older = row("theirs", 10.0, guarantee="in-process", cold_speedup_low=9.9, cold_speedup_high=10.1)
    newer = row("theirs", 10.0, guarantee="judged, landlock", run="r2", finished=NOON + dt.timedelta(days=1), **ends)
    beside = [row("mine", 50.0), row("ours", 60.0, cold_baseline_us=104.0)]
    store.write(store.to_table([older, newer, *beside]), tmp_path / "a.parquet")
    wanted = [*rows.WHICH, "device", "device_kind", "baseline", "cold_us", "steady_us", "cold_baseline_us"]
    table, _ = rows.load([tmp_path / "a.parquet"], tmp_path, wanted)
    shown = {each["kernel"]: each for each in rows.on_one_clock(rows.with_problem(table)).to_pylist()}
    assert shown["theirs"]["run"] == "r2" and shown["theirs"]["steady_us"] is None
    assert shown["theirs"]["cold_us"] == pytest.approx(100 / 1.1)  # by the judge's clock, and no other
    assert shown["mine"]["cold_us"] == pytest.approx(51.0)  # by the median of the baseline's two times
