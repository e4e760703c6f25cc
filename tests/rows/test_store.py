"""Rows in one schema: what is written is read again, and what others left never raises."""

from __future__ import annotations

import datetime
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minfer.rows import store
from minfer.rows.store import Row
from minfer.rows.writer import Writer

ROOT = Path(__file__).resolve().parents[2]
NOON = datetime.datetime(2025, 11, 21, 12, 0, 0, 123456, tzinfo=datetime.UTC)


def row(index: int = 0, **changes: Any) -> Row:
    return {"run": "r", "case": f"op/kernel/{index}", "status": "ok", "shape": {"m": index, "n": 8}} | changes


def cases(results: Path) -> list[str]:
    return [found["case"] for found in store.rows(store.files(results), ["case"])]


# The schema


def test_every_column_is_documented_and_appears_once() -> None:
    names = [name for name, _, _ in store.COLUMNS]
    assert len(set(names)) == len(names)
    for field in store.SCHEMA:
        assert field.metadata and len(field.metadata[b"doc"]) > 3, field.name
        assert field.nullable


def test_the_docs_survive_in_the_file(tmp_path: Path) -> None:
    schema = pq.read_schema(Writer(tmp_path, "s").append(row()))
    assert schema.equals(store.SCHEMA)
    assert [field.metadata[b"doc"].decode() for field in schema] == [doc for _, _, doc in store.COLUMNS]


def test_statuses_with_times_are_statuses() -> None:
    assert set(store.MEASURED) < set(store.STATUSES)


# Writing and reading


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    full = row(
        params={"layout": "TN", "accumulate": "float32"},
        shape={"k": 3, "m": 1, "n": 2},
        finished=NOON,
        message="größer, 1 < 2; 'a' \"b\"\n\x00",
        seed=2**32 - 1,
        cold_us=1.25e-7,
        rel_l2_error=float("inf"),
        cold_samples_us=[3.0, 1.0, 2.0],
        steady_samples_us=[],
        metrics={"l2_hit": 0.5},
        cold_rounds=0,
    )
    path = Writer(tmp_path, "s").append(full)
    (read,) = store.rows([path])
    assert {name: read[name] for name in full} == full
    assert list(read["shape"]) == ["k", "m", "n"]  # in the op's order
    assert read["finished"].tzinfo is not None
    assert list(read) == store.SCHEMA.names
    assert [name for name in read if name not in full and read[name] is not None] == []


def test_nan_is_not_null(tmp_path: Path) -> None:
    (read,) = store.rows([Writer(tmp_path, "s").append(row(rel_l2_error=float("nan")))])
    assert read["rel_l2_error"] != read["rel_l2_error"] and read["max_abs_error"] is None


CHARACTERS = st.characters(exclude_categories=["Cs"])  # what st.text() has, which finds that out in seconds
TEXT = st.text(CHARACTERS, max_size=8)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    params=st.dictionaries(TEXT, TEXT, max_size=3),
    shape=st.dictionaries(TEXT, st.integers(-(2**63), 2**63 - 1), max_size=3),
    samples=st.lists(st.floats(allow_nan=False), max_size=5) | st.none(),
    message=TEXT | st.none(),
)
def test_any_values_of_the_right_types_survive(
    tmp_path: Path, params: dict[str, str], shape: dict[str, int], samples: list[float] | None, message: str | None
) -> None:
    given_row = row(params=params, shape=shape, cold_samples_us=samples, message=message)
    store.write(store.to_table([given_row]), tmp_path / "any.parquet")
    (read,) = store.rows([tmp_path / "any.parquet"])
    assert {name: read[name] for name in given_row} == given_row


def test_an_unknown_column_is_an_error_that_names_it() -> None:
    with pytest.raises(KeyError, match="cold_uss, zzz"):
        store.to_table([row(), row(zzz=1), row(cold_uss=1.0)])


def test_no_rows_are_an_empty_table() -> None:
    assert store.to_table([]).schema.equals(store.SCHEMA) and len(store.to_table([])) == 0
    table, bad = store.read([])
    assert table.schema.equals(store.SCHEMA) and len(table) == 0 and bad == {}


# Reading what others left


def test_what_cannot_be_read_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    good = Writer(tmp_path, "a").append(row(1))
    bad = {
        name: tmp_path / f"{name}.parquet" for name in ("empty", "truncated", "text", "foreign", "retyped", "folder")
    }
    bad["empty"].write_bytes(b"")
    bad["truncated"].write_bytes(good.read_bytes()[:-20])
    bad["text"].write_text("case,kernel\n" * 1000)
    pq.write_table(pa.table({"name": ["x"], "value": [1]}), bad["foreign"])
    pq.write_table(pa.table({"case": ["x"], "cold_us": ["soon"]}), bad["retyped"])
    bad["folder"].mkdir()
    missing = tmp_path / "missing.parquet"
    last = Writer(tmp_path, "z").append(row(2))

    table, complaints = store.read([*store.files(tmp_path), missing])
    assert table["case"].to_pylist() == ["op/kernel/1", "op/kernel/2"]
    assert set(complaints) == {*bad.values(), missing}
    assert all(why and "\n" not in why for why in complaints.values())
    assert "no column 'case'" in complaints[bad["foreign"]]
    assert [found["case"] for found in store.rows([*bad.values(), last])] == ["op/kernel/2"]


def test_damage_anywhere_in_a_file_never_raises(tmp_path: Path) -> None:
    whole = Writer(tmp_path, "s").append(row(1, params={"a": "b"}, cold_samples_us=[1.0] * 100)).read_bytes()
    path, chance, found = tmp_path / "damaged.parquet", random.Random(0), 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 3, 30])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.choice([len(data), chance.randrange(len(data))])])
        table, bad = store.read([path])
        assert len(table) <= 1 and set(bad) <= {path}
        found += bool(bad)
    assert found > 75


def test_columns_that_an_older_file_lacks_are_null_and_those_it_has_too_many_are_ignored(tmp_path: Path) -> None:
    old = tmp_path / "old.parquet"
    pq.write_table(pa.table({"kernel": ["v01"], "case": ["old"], "cold_rounds": pa.array([3], pa.int32()),
                             "gone": [1]}), old)  # fmt: skip
    new = Writer(tmp_path, "new").append(row(1, kernel="v02", commit="abc"))
    table, bad = store.read([old, new])
    assert bad == {} and table.schema.names == store.SCHEMA.names
    first, second = table.to_pylist()
    assert (first["case"], first["kernel"], first["cold_rounds"], first["commit"]) == ("old", "v01", 3, None)
    assert (second["kernel"], second["commit"]) == ("v02", "abc")


def test_only_the_columns_asked_for_are_read_in_their_order(tmp_path: Path) -> None:
    path = Writer(tmp_path, "s").append(row(1))
    assert list(store.rows([path], ["status", "case"])) == [{"status": "ok", "case": "op/kernel/1"}]
    table, bad = store.read([path], ["status"])
    assert table.column_names == ["status"] and bad == {}
    with pytest.raises(KeyError):
        store.read([path], ["no such column"])


def test_files_are_the_parquet_files_below_a_folder_in_a_stable_order(tmp_path: Path) -> None:
    for name in ("b/s-001.parquet", "b/s-000.parquet", "a/run/s-000.parquet", "b/.s-002.parquet.123.tmp",
                 ".s-000.parquet", "b/notes.txt", "b/s-003.parquet.tmp", "apart/b/run/s-000.parquet"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = [str(path.relative_to(tmp_path)) for path in store.files(tmp_path)]
    assert found == ["a/run/s-000.parquet", "b/s-000.parquet", "b/s-001.parquet"]
    assert store.files(tmp_path / "apart") == [tmp_path / "apart" / "b" / "run" / "s-000.parquet"]
    assert store.files(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("device", "slug"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
        ("Intel(R) Xeon(R) Platinum 8480+", "intel-r-xeon-r-platinum-8480"),
        ("  A100/PCIe: 40GB ", "a100-pcie-40gb"),
        ("../..", "unknown"),
        ("", "unknown"),
        ("é", "unknown"),
    ],
)
def test_slug(device: str, slug: str) -> None:
    assert store.slug(device) == slug


@given(st.text(CHARACTERS, max_size=30))
def test_a_slug_is_one_plain_folder_name_and_its_own_slug(device: str) -> None:
    slug = store.slug(device)
    assert slug and set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and store.slug(slug) == slug
