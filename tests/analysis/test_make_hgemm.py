"""docs/hgemm.md from real parquet: what was measured is what it says, and what was not says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minfer import ops
from minfer.analysis import make
from minfer.analysis.makers import hgemm as make_hgemm
from minfer.rows import store
from tests.conftest import ROOT

MARKERS = "".join(f"<!-- {name}:{end} -->\n" for name in ("ladder", "devices", "skinny") for end in ("begin", "end"))
SOURCES = ROOT / "minfer" / "ops" / "hgemm"


def row(kernel: str, m: int, n: int, k: int, us: float, baseline_us: float = 10.0, **values: Any) -> store.Row:
    params, shape = {"layout": "TN", "accumulate": "float32"}, {"m": m, "n": n, "k": k}
    made: store.Row = {"run": "r", "op": "hgemm", "kernel": kernel, "backend": "cuda", "dtype": "bfloat16"}
    made |= {"case": f"hgemm/{kernel}/{values.get('dtype')}{shape}", "params": params, "shape": shape, "status": "ok"}
    made |= {"cold_us": us, "cold_tflops": 2e-6 * m * n * k / us, "cold_speedup": baseline_us / us, "baseline": "torch"}
    return made | {"cold_baseline_us": baseline_us, "device": "NVIDIA H200"} | values


def page(folder: Path, *rows: store.Row) -> str:
    (folder / "hgemm.md").write_text(MARKERS)
    store.write(store.to_table(list(rows)), folder / "rows.parquet")
    where = ["hgemm", "--results", str(folder), "--docs", str(folder)]
    assert make.main([*where, "--check"]) == 1
    assert make.main(where) == 0 and make.main([*where, "--check"]) == 0
    return (folder / "hgemm.md").read_text()


def cells(text: str, first: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_a_rungs_gain_is_over_the_rung_that_it_grew_from(tmp_path: Path) -> None:
    counted = {"ncu.shared_load_instructions": 10.0, "ncu.shared_load_conflicts": 310.0}
    counted |= {"ncu.tensor_percent": 0.0, "ncu.sm_mhz": 1979.7, "ncu.dram_bytes": 150.0}
    text = page(
        tmp_path,
        row("v01_naive", 512, 512, 512, 800.0),
        row("v02_tiled", 512, 512, 512, 200.0),
        row("v02_tiled", 1024, 1024, 1024, 900.0, metrics=counted, bytes=100),
        row("v04_mma", 1024, 1024, 1024, 100.0),
        row("v04_mma", 512, 512, 512, 240.0, baseline_us=12.0),  # the clock was a sixth slower than for the others
        row("v05_pipelined", 1024, 1024, 1024, 1.0, status="wrong"),
        row("v08_split_k", 1024, 1024, 1024, 50.0),
        row("v07_tuned", 1024, 1024, 1024, 1.0, dtype="float16"),
    )
    assert "**NVIDIA H200 · bfloat16 · TN · sums in float32, cold**" in text
    said = ["1024", "0.0 %", "—", "1980 MHz", "1.50×", "31.00"]
    assert cells(text, "v01_naive") == [["v01_naive", "0.3355", "—", "—", *["—"] * 6]]
    assert cells(text, "v02_tiled") == [["v02_tiled", "1.342", "2.386", "v01_naive: 4.00× at 512", *said]]
    assert cells(text, "v04_mma") == [
        ["v04_mma", "1.342", "21.47", "v02_tiled: 1.00× at 512, 9.00× at 1024", *["—"] * 6]
    ]
    assert cells(text, "v08_split_k") == [["v08_split_k", "—", "42.95", "—", *["—"] * 6]]  # it grew from v07
    for name in ("v05_pipelined", "v07_tuned"):  # it was wrong, and of another dtype
        assert cells(text, name) == [[name, "not measured yet", *[""] * 8]]
    assert not cells(text, "v15_gemv") and "Nothing was measured yet" in text  # of the skinny ones


def test_skinny_shapes_have_the_fastest_of_ours_and_their_mean(tmp_path: Path) -> None:
    text = page(
        tmp_path,
        row("torch", 1, 4096, 4096, 10.0, backend="torch"),
        row("v15_gemv", 1, 4096, 4096, 8.0),
        row("v16_skinny", 1, 4096, 4096, 5.0),
        row("v16_skinny", 64, 4096, 4096, 20.0),
        row("v16_skinny", 200, 4096, 4096, 1.0),
    )
    unmeasured = "not measured yet"
    assert cells(text, "4096 × 4096") == [
        ["4096 × 4096", "1", "10.00 µs", unmeasured, "8.000 µs", "5.000 µs", unmeasured, "2.00×, v16_skinny"],
        ["4096 × 4096", "64", "10.00 µs", unmeasured, "—", "20.00 µs", unmeasured, "0.500×, v16_skinny"],
    ]
    assert "Geometric mean over 2 shapes: 1.000×; the least is 0.500×." in text


def test_the_ratio_of_a_skinny_shape_is_that_of_the_times_beside_it(tmp_path: Path) -> None:
    text = page(
        tmp_path,
        row("v15_gemv", 1, 4096, 4096, 9.6, baseline_us=12.0),  # the clock was a sixth slower than for v16
        row("v16_skinny", 1, 4096, 4096, 5.0),
        row("v17_one_wave", 1, 4096, 4096, 9.0, baseline_us=11.0),
    )
    ((_, _, base, _, v15, v16, v17, ahead),) = cells(text, "4096 × 4096")
    assert [base, v15, v16, v17] == ["11.00 µs", "8.800 µs", "5.500 µs", "9.000 µs"] and ahead == "2.00×, v16_skinny"


def test_another_device_shows_what_was_measured_there_and_a_plot_of_both(tmp_path: Path) -> None:
    h100 = {"device": "NVIDIA H100"}
    mine = [row(kernel, 512, 512, 512, 800.0) for kernel in ("v01_naive", "v02_tiled")]
    there = [row("v02_tiled", 512, 512, 512, 900.0, **h100), row("v16_skinny", 1, 4096, 4096, 5.0, **h100)]
    plot = tmp_path / "plots" / "nvidia-h200" / "hgemm-devices.svg"
    text = page(tmp_path, *mine, row("v16_skinny", 1, 4096, 4096, 5.0), *there)
    assert len(cells(text, "v02_tiled")) == 2 and cells(text, "v01_naive")[0][1] == "0.3355"
    assert len(cells(text, "v01_naive")) == len(cells(text, "v07_tuned")) == 1
    assert text.index("**NVIDIA H200") < text.index("**NVIDIA H100")
    assert [len(line) for line in cells(text, "4096 × 4096")] == [8, 5] and "![" not in text
    plot.parent.mkdir(parents=True)
    plot.write_text("")
    text = page(tmp_path, *mine, row("v16_skinny", 1, 4096, 4096, 5.0), *there)
    assert "](plots/nvidia-h200/hgemm-devices.svg)" in text


def test_every_cuda_kernel_is_a_rung_in_ladder_order() -> None:
    names = make_hgemm.rungs(SOURCES)
    registered = [
        k.name for k in ops.get("hgemm").kernels.values() if k.backend == "cuda" and k.source.parent.name == "hgemm"
    ]
    assert set(names) == set(registered) and names.index("v02_tiled") < names.index("v02a_column") < names.index(
        "v03_wmma"
    )


def test_every_rung_has_its_place_in_the_tour() -> None:
    text = (ROOT / "docs" / "hgemm.md").read_text()
    toured = text[: text.index("<!-- ladder:begin -->")] + text[text.index("<!-- ladder:end -->") :]
    names = [name for name in make_hgemm.rungs(SOURCES) if not name.endswith("_acc16")]
    assert not [name for name in names if name not in toured]
