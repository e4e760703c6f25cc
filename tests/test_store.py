"""Rows on disk: whole or not at all, in one schema, whatever happens to the process that writes them."""

from __future__ import annotations

import datetime
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minfer import store
from minfer.store import Row, StoreError, Writer

ROOT = Path(__file__).resolve().parents[1]
NOON = datetime.datetime(2025, 11, 21, 12, 0, 0, 123456, tzinfo=datetime.UTC)


def row(index: int = 0, **changes: Any) -> Row:
    return {"run": "r", "case": f"op/kernel/{index}", "status": "ok", "shape": {"m": index, "n": 8}} | changes


def cases(results: Path) -> list[str]:
    return [found["case"] for found in store.rows(store.files(results), ["case"])]


def run(script: str, *words: str) -> subprocess.Popen[str]:
    """A script in a process of its own, in which minfer can be imported."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *words], env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


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


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_a_row_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "new" / "folder", "s")
    for index in range(5):
        path = writer.append(row(index))
        assert cases(path.parent) == [f"op/kernel/{i}" for i in range(index + 1)]


def test_parts_roll_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # 200 of them take a while on a slow disk
    writer = Writer(tmp_path, "s")
    count = 2 * store.ROWS_PER_PART + 3
    paths = [writer.append(row(index)) for index in range(count)]
    assert len(set(paths)) == 3 and store.files(tmp_path) == sorted(set(paths))
    assert [len(pq.read_table(path)) for path in store.files(tmp_path)] == [store.ROWS_PER_PART] * 2 + [3]
    assert cases(tmp_path) == [f"op/kernel/{i}" for i in range(count)]


def test_closing_merges_the_parts_into_one_file_with_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROWS_PER_PART", 2)
    monkeypatch.setattr(store, "ROWS_PER_GROUP", 6)
    other, writer = Writer(tmp_path, "s"), Writer(tmp_path, "s")
    kept = other.append(row(100))
    for index in range(15):
        writer.append(row(index))
    before = list(store.rows(store.files(tmp_path)))
    writer.close()
    assert store.files(tmp_path) == [kept, tmp_path / "s-001.parquet"]
    assert list(store.rows(store.files(tmp_path))) == before and len(before) == 16
    assert pq.ParquetFile(tmp_path / "s-001.parquet").num_row_groups == 3
    assert sorted(tmp_path.iterdir()) == store.files(tmp_path)


def test_what_cannot_be_merged_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROWS_PER_PART", 2)
    writer = Writer(tmp_path, "s")
    for index in range(5):
        writer.append(row(index))

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writer.close()
    assert cases(tmp_path) == [f"op/kernel/{i}" for i in range(5)]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_new_writer_never_touches_an_earlier_ones_files(tmp_path: Path) -> None:
    first = Writer(tmp_path, "s")
    old = first.append(row(0))
    before = old.read_bytes()
    second, third = Writer(tmp_path, "s"), Writer(tmp_path, "s")
    new = second.append(row(1))
    third.append(row(2))
    second.append(row(3))
    assert new != old and old.read_bytes() == before
    assert sorted(cases(tmp_path)) == [f"op/kernel/{i}" for i in range(4)]


def test_writers_that_roll_over_step_around_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(store, "ROWS_PER_PART", 2)
    writers = [Writer(tmp_path, "s") for _ in range(3)]
    for index in range(30):
        writers[index % 7 % 3].append(row(index))
    assert sorted(cases(tmp_path)) == sorted(f"op/kernel/{i}" for i in range(30))


def test_shards_do_not_share_files(tmp_path: Path) -> None:
    assert Writer(tmp_path, "0000").append(row()) != Writer(tmp_path, "0001").append(row())


# Writing that fails


def test_a_folder_that_cannot_be_made_gives_the_rows_back(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*s-000\.parquet") as caught:
        Writer(tmp_path / "file" / "results", "s").append(row(7))
    assert caught.value.rows == [row(7)]
    assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value)


FULL_DISK = """
import json, resource, sys
from pathlib import Path
from minfer.store import StoreError, Writer
writer = Writer(Path(sys.argv[1]), "s")
for index in range(int(sys.argv[2])):
    writer.append({"case": f"op/kernel/{index}"})
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
try:
    writer.append({"case": "too big", "cold_samples_us": [index * 1.1 for index in range(100_000)]})
except StoreError as error:
    print(json.dumps([str(error), [row["case"] for row in error.rows]]))
"""


@pytest.mark.parametrize("before", [0, 3])
def test_a_full_disk_keeps_the_earlier_rows_gives_the_others_back_and_leaves_no_litter(
    tmp_path: Path, before: int
) -> None:
    process = run(FULL_DISK, str(tmp_path), str(before))
    out, err = process.communicate(timeout=60)
    assert out, err
    message, returned = json.loads(out)
    kept = [f"op/kernel/{index}" for index in range(before)]
    assert "cannot write" in message and "File too large" in message and "\n" not in message
    assert cases(tmp_path) == kept
    assert [path.name for path in tmp_path.iterdir()] == ["s-000.parquet"] * bool(before)
    assert kept + returned == [*kept, "too big"]  # each row is in one place


def test_a_write_that_is_interrupted_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(file: int) -> None:
        raise KeyboardInterrupt

    writer = Writer(tmp_path, "s")
    path = writer.append(row(0))
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer.append(row(1))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


APPEND_FOR_EVER = """
import itertools, sys
from pathlib import Path
from minfer.store import Writer
writer = Writer(Path(sys.argv[1]), "s")
for index in itertools.count():
    writer.append({"case": f"op/kernel/{index}", "cold_samples_us": [1.5] * 2000})
    print(index, flush=True)
"""


def test_sigkill_at_any_moment_leaves_readable_files_with_every_row_that_was_acknowledged(tmp_path: Path) -> None:
    chance = random.Random(1)
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        process = run(APPEND_FOR_EVER, str(folder))
        assert process.stdout
        said = [process.stdout.readline()]
        try:
            process.communicate(timeout=chance.uniform(0, 0.6))
        except subprocess.TimeoutExpired:
            process.kill()
        rest, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
        acknowledged = len((said[0] + rest).splitlines())
        table, bad = store.read(store.files(folder))
        assert bad == {}
        assert table["case"].to_pylist() == [f"op/kernel/{index}" for index in range(len(table))]
        assert acknowledged >= 1 and len(table) in (acknowledged, acknowledged + 1)


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


@given(st.text(max_size=30))
def test_a_slug_is_one_plain_folder_name_and_its_own_slug(device: str) -> None:
    slug = store.slug(device)
    assert slug and set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and store.slug(slug) == slug


# Amending


def test_an_amended_row_keeps_everything_else_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROWS_PER_PART", 2)
    writer = Writer(tmp_path, "s")
    timed = {"cold_us": 0.1 + 0.2, "cold_samples_us": [1 / 3, float("nan")], "finished": NOON, "metrics": {"a.x": 1.0}}
    for index in range(5):
        writer.append(row(index, **timed))
    before = store.read(store.files(tmp_path))[0]
    for index in (0, 3, 4):  # the first, an earlier and the latest part
        writer.amend({f"op/kernel/{index}": {"metrics": {"b.y": index + 0.5}, "profilers": {"b": "ok"}}})
    writer.amend({"op/kernel/3": {"metrics": {"c.z": 7.0}, "profilers": {"c": "it hung"}}})
    after = store.read(store.files(tmp_path))[0]
    kept = [name for name in store.SCHEMA.names if name not in store.AMENDABLE]
    for name in kept:
        assert repr(after[name].to_pylist()) == repr(before[name].to_pylist()), name
    rows = list(store.rows(store.files(tmp_path)))
    assert [r["metrics"] for r in rows] == [
        {"a.x": 1.0, "b.y": 0.5}, {"a.x": 1.0}, {"a.x": 1.0}, {"a.x": 1.0, "b.y": 3.5, "c.z": 7.0}, {"a.x": 1.0, "b.y": 4.5},
    ]  # fmt: skip
    assert rows[3]["profilers"] == {"b": "ok", "c": "it hung"} and rows[1]["profilers"] is None
    writer.append(row(5))  # must not bring an older row back
    writer.close()
    merged = list(store.rows(store.files(tmp_path)))
    assert [r["metrics"] for r in merged[:5]] == [r["metrics"] for r in rows] and len(merged) == 6
    assert len(store.files(tmp_path)) == 1


def test_only_what_profilers_fill_can_be_amended(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "s")
    path = writer.append(row(0, cold_us=2.0))
    before = path.read_bytes()
    with pytest.raises(KeyError, match="cold_us"):
        writer.amend({"op/kernel/0": {"cold_us": 1.0, "metrics": {"a": 1.0}}})
    with pytest.raises(KeyError):
        writer.amend({"op/kernel/1": {"metrics": {"a": 1.0}}})
    assert path.read_bytes() == before


def test_an_amendment_that_cannot_be_written_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path, "s")
    path = writer.append(row(0, cold_us=2.0))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device") as caught:
        writer.amend({"op/kernel/0": {"metrics": {"a": 1.0}}})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    assert caught.value.rows == [{"case": "op/kernel/0", "metrics": {"a": 1.0}}]
