"""docs/anywhere.md from rows: drawn problems are shown there, and nowhere else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from minfer.analysis import make
from minfer.analysis.makers import anywhere
from minfer.rows import store
from tests.tables import row

PAGE = "<!-- anywhere:begin -->\n<!-- anywhere:end -->\n"


def drawn(kernel: str, m: int, us: float, backend: str = "torch", **values: Any) -> store.Row:
    """A row at a drawn problem; the baseline takes 100 us, and its interval is 1 % to both sides."""
    speedup = 100 / us
    made = row(kernel, us, f"float16/layout=TN,accumulate=float32/m={m},n=64,k=64", backend=backend, drawn=7)
    made |= {"shape": {"m": m, "n": 64, "k": 64}, "dtype": "float16", "cold_aa_spread": 0.0}
    made |= {"cold_speedup_low": speedup * 0.99, "cold_speedup_high": speedup * 1.01}
    made["cold_verdict"] = "faster" if speedup > 1.02 else "slower" if speedup < 0.98 else "tie"
    return made | values


def function(m: int, us: float, **values: Any) -> store.Row:
    return drawn("matmul", m, us, "function", **{"chosen": "v05_pipelined, the fastest of 3"} | values)


def page(folder: Path, *rows: store.Row, check: int = 0) -> str:
    (folder / "anywhere.md").write_text(PAGE)
    store.write(store.to_table(list(rows)), folder / "rows.parquet")
    where = ["anywhere", "--results", str(folder), "--docs", str(folder)]
    assert make.main([*where, "--check"]) == 1
    assert make.main(where) == check and make.main([*where, "--check"]) == check
    return (folder / "anywhere.md").read_text()


def test_a_ratio_is_over_the_fastest_of_what_is_not_minfers(tmp_path: Path) -> None:
    text = page(
        tmp_path,
        *(drawn("torch", m, 100.0) for m in (1, 2, 3)),
        drawn("torch_compile", 1, 50.0),  # twice as fast as torch
        drawn("v05_pipelined", 2, 10.0, "cuda"),  # ours, so no other
        function(1, 50.0),  # as fast as the best other
        function(2, 200.0),
        function(3, 50.0),
        function(4, 1.0, status="wrong", message="3 of 64 elements", cold_us=None, cold_speedup=None),
    )
    mean = math.exp((math.log(1.0) + math.log(0.5) + math.log(2.0)) / 3)
    assert f"| `minfer.matmul` | 7 | 3 | {mean:.2f}× | 0.500× | 67 % | 1 |" in text
    assert "m=2,n=64,k=64 | 0.500× | torch | v05\\_pipelined |".replace("\\_", "_") in text
    assert "m=1,n=64,k=64 | 1.00× | torch_compile" in text
    assert "wrong: 3 of 64 elements" in text
    assert (tmp_path / "plots" / "nvidia-h200" / "anywhere-functions.svg").is_file()


def test_an_interval_that_is_too_wide_gives_no_ratio(tmp_path: Path) -> None:
    wide = {"cold_speedup_low": 0.1, "cold_speedup_high": 9.0}
    text = page(
        tmp_path, drawn("torch", 1, 100.0), function(1, 50.0, **wide), drawn("torch", 2, 100.0), function(2, 50.0)
    )
    assert "| `minfer.matmul` | 7 | 1 | 2.00× | 2.00× | 100 % | 1 |" in text


def test_rows_of_drawn_problems_are_in_no_other_table_and_displace_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = {"finished": row()["finished"].replace(year=2027)}
    chosen = {"drawn": None, "us": 80.0}
    rows = [drawn("torch", 1, 100.0, **later), function(1, 50.0, **later), drawn("torch", 1, chosen["us"], drawn=None)]
    store.write(store.to_table(rows), tmp_path / "rows.parquet")
    seen = {}
    maker = anywhere.MAKER.__class__(lambda table, _: seen.update(rows=table.to_pylist()) or [], anywhere.COLUMNS)
    monkeypatch.setattr(make, "_maker", lambda name: maker)
    assert make.main(["best", "--results", str(tmp_path)]) == 0
    assert [(of["kernel"], of["cold_us"]) for of in seen["rows"]] == [("torch", 80.0)]


def test_without_rows_the_page_says_how_to_get_some(tmp_path: Path) -> None:
    assert "+sweep=anywhere draw.problems=200" in page(tmp_path, row())


def test_beside_the_definition_alone_there_is_no_ratio(tmp_path: Path) -> None:
    text = page(
        tmp_path,
        *(drawn("torch_eager", m, 100.0) for m in (1, 2)),
        drawn("torch", 2, 100.0),
        function(1, 1.0, baseline="torch_eager"),
        function(2, 50.0),
    )
    assert "| `minfer.matmul` | 7 | 1 | 2.00× | 2.00× | 100 % | 1 |" in text
    assert (
        "Without a ratio, 1: nothing but torch_eager, the definition in several launches, was timed beside it" in text
    )


def test_a_ratio_that_is_too_uncertain_is_not_shown_and_the_page_says_so(tmp_path: Path) -> None:
    text = page(
        tmp_path,
        *(drawn("torch", m, 100.0) for m in (1, 2, 3)),
        function(1, 50.0, cold_speedup_low=0.5, cold_speedup_high=5.0),
        function(2, 50.0),
        function(3, 1.0, status="wrong", message="3 of 64 elements", cold_us=None, cold_speedup=None),
    )
    assert "| `minfer.matmul` | 7 | 1 | 2.00× | 2.00× | 100 % | 2 |" in text
    assert "Without a ratio, 2: the interval of its ratio is too wide; wrong: 3 of 64 elements" in text
