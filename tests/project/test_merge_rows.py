"""`tools/merge_rows.py` loses nothing; and the committed rows are those that came back from the runs, cell for cell."""

from __future__ import annotations

import datetime
import json
import math
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minfer.rows import store
from tools import merge_rows
from tools.merge_rows import MANIFEST, digests, main, read_whole

ROOT = Path(__file__).resolve().parents[2]
NOON = datetime.datetime(2026, 11, 25, 12, 0, 0, 123457, datetime.UTC)
FIRST, SECOND = "20261124-074022-f3ae", "20261125-101112-0a0b"


def unlike(device: Path) -> set[str]:
    """The digests of a device's rows that are not in its manifest, and those that are only there."""
    noted = json.loads((device / MANIFEST).read_text())
    kept = [digest for path in sorted(device.glob("*.parquet")) for digest in digests(read_whole(path))]
    assert len(set(kept)) == len(kept)
    return set(kept) ^ {digest for file in noted.values() for digest in file.split()}


def test_every_cell_is_as_it_came_back_from_its_run() -> None:
    devices = sorted(path.parent for path in (ROOT / "results").glob(f"*/{MANIFEST}"))
    assert [device for device in devices if unlike(device)] == []
    noted = [json.loads((device / MANIFEST).read_text()) for device in devices]
    assert sum(map(len, noted)) >= 127
    assert sum(len(file.split()) for names in noted for file in names.values()) >= 3375


def test_a_digest_is_of_every_cell() -> None:
    path = ROOT / "results" / "nvidia-h200" / "seq_sum.parquet"
    table = read_whole(path)
    row = table.slice(0, 1).to_pylist()[0]
    before = digests(table)[0]
    for name, value in row.items():
        other = changed(value, store.SCHEMA.field(name).type)
        assert digests(store.to_table([row | {name: other}])) != [before], name
    assert digests(store.to_table([row])) == [before]
    assert digests(table.drop_columns(["image"])) == digests(table)  # it is null, as where a file has no such column


def changed(value: Any, kind: pa.DataType) -> Any:
    """Another value for a cell, as near as there is one."""
    if pa.types.is_list(kind):
        return [] if value is None else [*value[:-1], changed(value[-1], kind.value_type)] if value else None
    if pa.types.is_map(kind):
        if not value:
            return [] if value is None else None
        return [*value[:-1], (value[-1][0], changed(value[-1][1], kind.item_type))]
    if pa.types.is_floating(kind):
        return 0.0 if value is None else math.nextafter(value, math.inf)
    if pa.types.is_integer(kind):
        return 0 if value is None else value + 1
    if pa.types.is_timestamp(kind):
        return value + datetime.timedelta(microseconds=1)
    return "" if value is None else value + " "


def test_a_changed_cell_is_found(tmp_path: Path) -> None:
    device = tmp_path / "nvidia-h200"
    write(device / FIRST / "0000-000.parquet", [row(0), row(1)])
    assert merged(device / FIRST) == 0 and not unlike(device)
    table = read_whole(device / "rope.parquet").to_pylist()
    table[1]["cold_samples_us"][2] = math.nextafter(table[1]["cold_samples_us"][2], math.inf)
    store.write(store.to_table(table), device / "rope.parquet")
    assert len(unlike(device)) == 2


def row(index: int, run: str = FIRST, **changes: Any) -> store.Row:
    values = {"run": run, "case": f"rope/v01/{index}", "op": "rope", "kernel": "v01", "status": "ok", "node": "n1"}
    values |= {"device": "NVIDIA H200", "finished": NOON + datetime.timedelta(seconds=index), "cold_us": 0.1 + index}
    values |= {"shape": {"m": index, "n": 8}, "metrics": {"ncu.a": math.nan, "b": -0.0}, "params": {}}
    values |= {"cold_samples_us": [0.1, math.nan, 3.0], "steady_samples_us": [], "steady_blocks": [1, 2]}
    return values | {"audit_kernels": ["a", "b"], "message": "2 µs"} | changes


def write(path: Path, rows: list[store.Row], without: tuple[str, ...] = ()) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    store.write(store.to_table(rows).drop_columns(list(without)), path)


def merged(*runs: Path) -> int:
    return main([str(run) for run in runs])


def cells(device: Path) -> list[str]:
    """All rows below a folder with all their cells, in the order of runs."""
    return sorted(map(repr, store.rows(store.files(device))))


def test_all_rows_of_runs_with_all_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = tmp_path / "nvidia-h200"
    write(device / FIRST / "0000-000.parquet", [row(3), row(1)], without=("judged_us", "metrics"))  # an older file
    write(device / FIRST / "0001-000.parquet", [row(2), row(5, op="rmsnorm", case="rmsnorm/v01/5")])
    write(device / SECOND / "0000-000.parquet", [row(1, run=SECOND, cold_us=None)])
    (device / FIRST / "ncu").mkdir()
    before, names = cells(device), [path.relative_to(device).as_posix() for path in store.files(device)]
    assert merged(device / SECOND, device / FIRST) == 0
    assert capsys.readouterr().out == (
        f"5 rows of 3 files are in 2 files of {device}, where 0 were before; every cell was compared before the 3 files were"
        " deleted.\n"
    )
    assert cells(device) == before
    assert store.files(device) == [device / "rmsnorm.parquet", device / "rope.parquet"]
    rope = read_whole(device / "rope.parquet")
    assert rope["case"].to_pylist() == ["rope/v01/3", "rope/v01/1", "rope/v01/2", "rope/v01/1"]  # as shards had them
    assert rope.schema.equals(store.SCHEMA) and rope["finished"][0].as_py() == NOON + datetime.timedelta(seconds=3)
    assert list(json.loads((device / MANIFEST).read_text())) == names
    assert (device / FIRST / "ncu").is_dir() and not (device / SECOND).exists()


def test_a_run_that_is_merged_twice_is_there_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = tmp_path / "nvidia-h200"
    write(device / SECOND / "0000-000.parquet", [row(0, run=SECOND)])
    assert merged(device / SECOND) == 0
    file = (device / "rope.parquet").read_bytes()
    write(device / SECOND / "0000-000.parquet", [row(0, run=SECOND)])
    assert merged(device / SECOND) == 0
    assert "where 1 were before" in capsys.readouterr().out
    assert (device / "rope.parquet").read_bytes() == file and not unlike(device)
    write(device / SECOND / "0000-000.parquet", [row(7, run=SECOND)])  # resubmitted: the same name, and another row
    write(device / FIRST / "0000-000.parquet", [row(1)])
    assert merged(device / SECOND, device / FIRST) == 0 and not unlike(device)
    assert read_whole(device / "rope.parquet")["run"].to_pylist() == [FIRST, SECOND, SECOND]


@pytest.mark.parametrize("step", ["replace", "unlink"])
def test_a_merge_that_was_interrupted(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "nvidia-h200"
    for shard in range(3):
        write(
            device / FIRST / f"000{shard}-000.parquet", [row(shard), row(shard, op="rmsnorm", case=f"rmsnorm/{shard}")]
        )
    before, done = set(cells(device)), []
    module, name = (os, "replace") if step == "replace" else (Path, "unlink")
    true = getattr(module, name)

    def interrupted(*words: Any, **options: Any) -> None:
        done.append(words)
        if len(done) == 2:
            raise OSError("no more")
        true(*words, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, interrupted)
        assert merged(device / FIRST) == 1
    assert set(cells(device)) == before
    assert merged(device / FIRST) == 0
    assert len(cells(device)) == 6 and set(cells(device)) == before and not unlike(device)
    assert sorted(device.iterdir()) == [device / MANIFEST, device / "rmsnorm.parquet", device / "rope.parquet"]


def test_what_does_not_read_back_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    device = tmp_path / "nvidia-h200"
    write(device / FIRST / "0000-000.parquet", [row(0), row(1)])
    true = pq.write_table

    def lossy(table: pa.Table, *words: Any, **options: Any) -> None:
        rows = table.to_pylist()
        rows[1]["steady_blocks"] = [1]
        true(store.to_table(rows), *words, **options)

    monkeypatch.setattr(merge_rows.pq, "write_table", lossy)
    assert merged(device / FIRST) == 1
    assert "does not read back as it was written" in capsys.readouterr().err
    assert [path.name for path in sorted(device.rglob("*.*"))] == ["0000-000.parquet"]


def test_a_file_that_changes_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    device = tmp_path / "nvidia-h200"
    file = device / FIRST / "0000-000.parquet"
    write(file, [row(0)])
    true = merge_rows._note

    def slow(*words: Any) -> None:
        true(*words)
        write(file, [row(0), row(1)])

    monkeypatch.setattr(merge_rows, "_note", slow)
    assert merged(device / FIRST) == 1
    assert "has changed since it was read; repeat the command when its run has ended" in capsys.readouterr().err
    monkeypatch.undo()
    assert merged(device / FIRST) == 0 and len(cells(device)) == 2 and not unlike(device)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run": SECOND}, f"has a row of the run {SECOND}; name folders"),
        ({"device": "NVIDIA L40S"}, "has a row of the device NVIDIA L40S; its folder would be nvidia-l40s"),
        ({"op": "../rope"}, "has a row of the op '../rope', which names no file"),
        ({"cold_us": 7.0}, "would have two rows with different cells for the same"),
    ],
)
def test_rows_that_have_no_place(changes: dict[str, Any], said: str, tmp_path: Path, capsys) -> None:
    device = tmp_path / "nvidia-h200"
    write(device / FIRST / "0000-000.parquet", [row(0)])
    assert merged(device / FIRST) == 0
    write(device / FIRST / "0001-000.parquet", [row(0, **changes)])
    before = sorted(device.rglob("*")), (device / "rope.parquet").read_bytes()
    assert merged(device / FIRST) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert (sorted(device.rglob("*")), (device / "rope.parquet").read_bytes()) == before


def test_files_that_would_lose_something(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "nvidia-h200" / FIRST
    file = folder / "0000-000.parquet"
    write(file, [row(0)])
    table = read_whole(file)
    place = table.column_names.index("finished")
    for other, said in (
        (table.append_column("new", pa.array([1])), "has the column new, which this version of minfer has not"),
        (
            table.set_column(place, "finished", table["finished"].cast(pa.timestamp("ns", tz="UTC"))),
            "has the column finished as timestamp[ns, tz=UTC], not timestamp[us, tz=UTC]",
        ),
        (table.replace_schema_metadata({"from": "me"}), "has metadata of its own (from)"),
        (table.drop_columns(["case"]), "cannot be read: not a minfer results file"),
        (b"PAR1", "cannot be read: "),
        (None, "has no parquet files; name the folder of a run"),
    ):
        file.unlink()
        if isinstance(other, pa.Table):
            pq.write_table(other, file)
        elif other:
            file.write_bytes(other)
        assert merged(folder) == 1
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
        assert [path.name for path in tmp_path.rglob("*.*")] == ([file.name] if other else [])
        file.touch()
