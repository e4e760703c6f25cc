"""`minfer.results`: rows of any op as one flat DataFrame."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import minfer
from minfer.rows import store
from minfer.rows.store import Row
from tests.conftest import ROOT
from tests.tables import H200, NOON, other, row

NORM = "bfloat16/residual=add/tokens=64,hidden=4096"


def hgemm(kernel: str = "torch", us: float = 100.0, m: int = 512, **values: object) -> Row:
    params, shape = {"layout": "TN", "accumulate": "float32"}, {"m": m, "n": 8, "k": 16}
    return row(kernel, us, f"float16/layout=TN/m={m}") | {"params": params, "shape": shape, "dtype": "float16"} | values


def write(folder: Path, *rows: Row, name: str = "a") -> None:
    store.write(store.to_table(rows), folder / f"{name}.parquet")


def test_axes_and_parameters_of_every_op_are_columns(tmp_path: Path) -> None:
    write(tmp_path, hgemm(metrics={"ncu.sm_mhz": 1.0}), name="b")
    write(tmp_path, other("norm", "GB/s", "v01", 50.0, NORM), row("old", status="wrong"))
    found = minfer.results(tmp_path)
    assert list(found["kernel"]) == ["v01", "old", "torch"]
    assert found["m"].dtype == "Int64" and list(found["m"].fillna(-1)) == [-1, -1, 512]
    assert list(found["tokens"].fillna(-1)) == [64, -1, -1] and list(found["residual"].fillna("")) == ["add", "", ""]
    assert list(found["layout"].fillna("")) == ["", "", "TN"]
    assert not {"shape", "params", "metrics", "peaks", "cold_samples_us"} & set(found)
    assert list(found.columns[found.columns.get_loc("dtype") + 1 :][:3]) == ["residual", "layout", "accumulate"]


def test_old_rows_have_a_metric_and_rates(tmp_path: Path) -> None:
    write(tmp_path, hgemm(), other("norm", "GB/s", "v01", 50.0, NORM))
    found = minfer.results(tmp_path, ["metric", "cold_rate", "steady_rate"])
    assert found.values.tolist() == [["TFLOP/s", 10.0, 10.0], ["GB/s", 2e4, 2e4]]
    assert minfer.results(tmp_path, ["steady_rate"])["steady_rate"].tolist() == [10.0, 2e4]


def test_columns_are_those_asked_for_in_that_order(tmp_path: Path) -> None:
    made = hgemm(metrics={"ncu.sm_mhz": 1980.0, "static.sm_90a.registers": 168.0}, cold_samples_us=[1.0, 2.0])
    write(tmp_path, made, hgemm("v01", peaks={"copy_gbps": 4e3}))
    found = minfer.results(tmp_path, ["k", "metrics.ncu.sm_mhz", "kernel", "peaks", "cold_samples_us", "metrics.none"])
    assert list(found) == ["k", "metrics.ncu.sm_mhz", "kernel", "peaks.copy_gbps", "cold_samples_us", "metrics.none"]
    assert found["metrics.ncu.sm_mhz"].tolist()[0] == 1980.0 and found["peaks.copy_gbps"].tolist()[1] == 4e3
    assert list(found["cold_samples_us"][0]) == [1.0, 2.0] and found["metrics.none"].isna().all()
    assert list(minfer.results(tmp_path, ["shape", "params"])) == ["m", "n", "k", "layout", "accumulate"]
    assert list(minfer.results(tmp_path, ["metrics"])) == ["metrics.ncu.sm_mhz", "metrics.static.sm_90a.registers"]


def test_names_that_are_taken_say_what_they_are_of(tmp_path: Path) -> None:
    write(tmp_path, row(params={"seed": "a", "heads": "all"}, shape={"bytes": 7, "heads": 8}, seed=1, bytes=9.0))
    found = minfer.results(tmp_path, ["seed", "params.seed", "bytes", "shape.bytes", "heads", "params.heads"])
    assert found.iloc[0].tolist() == [1, "a", 9.0, 7, 8, "all"]


def test_the_newest_row_of_each_case_and_device(tmp_path: Path) -> None:
    later = NOON + dt.timedelta(hours=1)
    write(tmp_path, hgemm(us=1.0, finished=later), hgemm(us=4.0, device="NVIDIA L40S"))
    write(tmp_path, hgemm(us=2.0), hgemm("v01", 3.0), name="b")
    assert minfer.results(tmp_path)["cold_us"].tolist() == [1.0, 4.0, 2.0, 3.0]
    newest = minfer.results(tmp_path, ["device", "kernel", "cold_us"], newest=True)
    assert list(newest) == ["device", "kernel", "cold_us"]
    assert newest["cold_us"].tolist() == [1.0, 4.0, 3.0]


def test_the_newest_row_of_a_regime(tmp_path: Path) -> None:
    later, none = NOON + dt.timedelta(hours=1), {"steady_us": None}
    failed = hgemm("v01", finished=later, status="crashed", cold_us=None, steady_us=None)
    write(tmp_path, hgemm(us=1.0, run="old"), hgemm(us=2.0, run="new", finished=later, **none), hgemm("v01"), failed)
    found = {regime: minfer.results(tmp_path, ["run", "status"], newest=regime) for regime in (True, "cold", "steady")}
    assert found["steady"].values.tolist() == [["old", "ok"], ["r1", "crashed"]]
    assert found[True].equals(found["cold"]) and found["cold"]["run"].tolist() == ["new", "r1"]
    with pytest.raises(ValueError, match=r"^minfer\.results takes newest=True, 'cold' or 'steady', got 'warm'$"):
        minfer.results(tmp_path, newest="warm")


def test_the_documented_line_pivots(tmp_path: Path) -> None:
    write(tmp_path, *(hgemm(kernel, us, m) for m in (1, 2) for kernel, us in {"torch": 100.0, "v01": 50.0}.items()))
    first, second = [line.strip() for line in str(minfer.results.__doc__).splitlines() if line.startswith(" " * 8)]
    names: dict[str, object] = {"minfer": minfer}
    exec(first.replace("results(", f"results({str(tmp_path)!r}, "), names)
    found = eval(second, names)
    (row,) = [row for index, row in found.iterrows() if index[0] == H200 and index[-3:] == (2, 8, 16)]
    assert row.to_dict() == {"torch": 10.0, "v01": 20.0}


def test_mistakes_are_a_sentence_each(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^nowhere is not a folder: give minfer\.results the one with"):
        minfer.results("nowhere")
    write(tmp_path, hgemm())
    with pytest.raises(ValueError, match=r"^no row has a column 'cold_uss'; did you mean cold_us or"):
        minfer.results(tmp_path, ["cold_uss"])
    with pytest.raises(ValueError, match=r"^no row has a column 'zzzz'; minfer\.rows\.store has their names$"):
        minfer.results(tmp_path, ["zzzz"])


def test_a_file_that_cannot_be_read_is_skipped_with_a_warning(tmp_path: Path) -> None:
    write(tmp_path, hgemm())
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.warns(UserWarning, match=r"bad\.parquet: .*; skipped$") as warned:
        assert len(minfer.results(tmp_path)) == 1
    assert [warning.filename for warning in warned] == [__file__]


def test_an_empty_folder_is_a_frame_without_rows(tmp_path: Path) -> None:
    found = minfer.results(tmp_path, newest=True)
    assert isinstance(found, pd.DataFrame) and found.empty and "cold_rate" in found and "m" not in found


def test_it_takes_no_pytorch() -> None:
    code = "import sys, minfer; minfer.results; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_row_whose_ratio_says_little_does_not_hide_an_older_one(tmp_path: Path) -> None:
    """A quarter of the ratio is the limit, and where no row is below it, the newest row counts."""
    later = {"run": "new", "finished": NOON + dt.timedelta(hours=1), "cold_speedup": 100.0, "cold_speedup_low": 90.0}
    write(tmp_path, hgemm("v01", run="old"), hgemm("v01", **later, cold_speedup_high=116.0))
    write(tmp_path, hgemm("v02", run="old"), hgemm("v02", **later, cold_speedup_high=114.0), name="b")
    write(tmp_path, hgemm("v03", **later, cold_speedup_high=200.0), name="c")
    found = minfer.results(tmp_path, ["kernel", "run"], newest="cold")
    assert found.values.tolist() == [["v01", "old"], ["v02", "new"], ["v03", "new"]]
