"""The rows of a shard on disk: whole or not at all, whatever happens to the process that writes them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from minfer.rows import store
from minfer.rows import writer as writing
from minfer.rows.writer import StoreError, Writer
from tests.rows.test_store import NOON, ROOT, cases, row


def run(script: str, *words: str) -> subprocess.Popen[str]:
    """A script in a process of its own, in which minfer can be imported."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *words], env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_row_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "new" / "folder", "s")
    for index in range(5):
        path = writer.append(row(index))
        assert cases(path.parent) == [f"op/kernel/{i}" for i in range(index + 1)]


def test_parts_roll_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "ROWS_PER_PART", 8)
    writer = Writer(tmp_path, "s")
    count = 2 * writing.ROWS_PER_PART + 3
    paths = [writer.append(row(index)) for index in range(count)]
    assert len(set(paths)) == 3 and store.files(tmp_path) == sorted(set(paths))
    assert [len(pq.read_table(path)) for path in store.files(tmp_path)] == [writing.ROWS_PER_PART] * 2 + [3]
    assert cases(tmp_path) == [f"op/kernel/{i}" for i in range(count)]


def test_closing_merges_the_parts_into_one_file_with_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "ROWS_PER_PART", 2)
    monkeypatch.setattr(writing, "ROWS_PER_GROUP", 6)
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
    monkeypatch.setattr(writing, "ROWS_PER_PART", 2)
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
    monkeypatch.setattr(writing, "ROWS_PER_PART", 2)
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
from minfer.rows.writer import StoreError, Writer
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
from minfer.rows.writer import Writer
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


# Amending


def test_an_amended_row_keeps_everything_else_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "ROWS_PER_PART", 2)
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
