"""docs/anywhere.md and the pages of ops from rows: drawn problems are shown there, and nowhere else."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from minfer.analysis import make
from minfer.analysis.makers import anywhere
from minfer.rows import store
from tests.tables import row

PAGE = "<!-- anywhere:begin -->\n<!-- anywhere:end -->\n"
OF_OP = "# An op\n\n<!-- drawn:begin -->\n<!-- drawn:end -->\n"
ROW = "| `minfer.matmul`"  # of a function whose op has no page, so that the name is no link


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


def of(op: str, name: str, problem: str, us: float) -> list[store.Row]:
    """A function of an op at a drawn problem, and beside it the baseline, which takes 100 us."""
    params, shape = (dict(part.split("=") for part in text.split(",") if part) for text in problem.split("/")[1:])
    named = {"op": op, "params": params, "shape": {axis: int(size) for axis, size in shape.items()}}
    rows = [drawn("torch", 1, 100.0), drawn(name, 1, us, "function")]
    return [row | named | {"case": f"{op}/{row['kernel']}/{problem}"} for row in rows]


def page(folder: Path, *rows: store.Row, name: str = "anywhere", check: int = 0) -> str:
    (folder / "anywhere.md").write_text(PAGE)
    store.write(store.to_table(list(rows)), folder / "rows.parquet")
    where = ["anywhere", "--results", str(folder), "--docs", str(folder), "--readme", str(folder / "README.md")]
    assert make.main([*where, "--check"]) == 1
    assert make.main(where) == check and make.main([*where, "--check"]) == check
    return (folder / f"{name}.md").read_text()


def of_op(folder: Path, *rows: store.Row, op: str = "hgemm") -> str:
    (folder / f"{op}.md").write_text(OF_OP)
    return page(folder, *rows, name=op)


def test_a_ratio_is_over_the_fastest_of_what_is_not_minfers(tmp_path: Path) -> None:
    text = of_op(
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
    assert f"| all | 3 | {mean:.2f}× | 0.500× | 67 % |" in text
    assert "m=2,n=64,k=64 | 0.500× | torch | v05_pipelined |" in text
    assert "m=1,n=64,k=64 | 1.00× | torch_compile" in text
    assert "Without a ratio, 1: wrong: 3 of 64 elements" in text
    overview = (tmp_path / "anywhere.md").read_text()
    assert f"[`minfer.matmul`](hgemm.md#at-drawn-problems) | 7 | 3 | {mean:.2f}× | 0.500× | 67 % | 1 |" in overview
    assert (tmp_path / "plots" / "nvidia-h200" / "anywhere-functions.svg").is_file()


def test_an_op_without_a_page_is_in_the_overview_without_a_link(tmp_path: Path) -> None:
    assert f"{ROW} | 7 | 1 | 2.00×" in page(tmp_path, drawn("torch", 1, 100.0), function(1, 50.0))


def test_the_page_of_an_op_with_drawn_rows_needs_a_place_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hgemm.md").write_text("# An op\n")
    page(tmp_path, drawn("torch", 1, 100.0), function(1, 50.0), check=1)
    assert "hgemm.md: it needs one line <!-- drawn:begin --> and" in capsys.readouterr().err


def test_problems_are_shown_by_ranges_of_rows(tmp_path: Path) -> None:
    times = {1: 50.0, 16: 200.0, 17: 50.0, 1024: 200.0, 1025: 25.0, 8192: 100.0, 8193: 10.0}
    rows = [row for m, us in times.items() for row in (drawn("torch", m, 100.0), function(m, us))]
    lines = of_op(tmp_path, *rows).splitlines()
    start = lines.index("| M | Problems | Geometric mean | Least | Not slower |")
    assert lines[start - 2] == "**NVIDIA H200 · `minfer.matmul` · seed 7**"
    assert lines[start + 2 : start + 9] == [
        "| 1–16 | 2 | 1.00× | 0.500× | 50 % |",
        "| 17–128 | 1 | 2.00× | 2.00× | 100 % |",
        "| 129–1024 | 1 | 0.500× | 0.500× | 0 % |",
        "| 1025–8192 | 2 | 2.00× | 1.00× | 100 % |",
        "| from 8193 | 1 | 10.0× | 10.0× | 100 % |",
        f"| all | 7 | {(2 * 0.5 * 2 * 0.5 * 4 * 1 * 10) ** (1 / 7):.2f}× | 0.500× | 71 % |",
        "",
    ]


def test_a_range_of_attention_is_of_queries_and_not_of_sequences(tmp_path: Path) -> None:
    rows = of("prefill_attention", "attention", "float16//batch=200,seq_q=4,seq_kv=4", 50.0)
    text = of_op(tmp_path, *rows, op="prefill_attention")
    assert "| Queries of a sequence | Problems |" in text and "| 1–16 | 1 | 2.00×" in text and "129–1024" not in text


def test_groups_of_formats_are_apart_but_the_slowest_are_not(tmp_path: Path) -> None:
    times = {"q4_k": 10.0, "q8_0": 40.0, "int4_g128": 200.0, "int4_g64": 50.0, "fp8_fp8": 100.0}
    problems = {name: f"bfloat16/format={name},accumulate=float32/m=4,n=64,k=64" for name in times}
    rows = [row for name, us in times.items() for row in of("quant_gemm", "quant_gemm", problems[name], us)]
    text = of_op(tmp_path, *rows, op="quant_gemm")
    assert "| Format | M | Problems |" in text
    for form, figures in {
        "int4": "2 | 1.00× | 0.500×",
        "fp8": "1 | 1.00× | 1.00×",
        "GGUF": "2 | 5.00× | 2.50×",
    }.items():
        assert f"| {form} | 1–16 | {figures} |" in text and f"| {form} | all | {figures} |" in text
    order = ["int4_g128", "fp8_fp8", "int4_g64", "q8_0", "q4_k"]
    assert [line.split("format=")[1].split(",")[0] for line in text.splitlines() if "format=" in line] == order


def test_an_op_whose_axes_say_nothing_of_its_size_has_one_line(tmp_path: Path) -> None:
    text = of_op(tmp_path, *of("mine", "mine", "float16//length=4", 50.0), op="mine")
    assert "| Size | Problems |" in text and "| all | 1 | 2.00×" in text and "1–16" not in text


def test_the_slowest_ten_are_named(tmp_path: Path) -> None:
    rows = [row for m in range(1, 13) for row in (drawn("torch", m, 100.0), function(m, 100.0 - m))]
    text = of_op(tmp_path, *rows)
    assert "m=10,n=64" in text and "m=11,n=64" not in text


def test_each_device_has_tables_of_its_own(tmp_path: Path) -> None:
    rows = [drawn("torch", 1, 100.0), function(1, 50.0)]
    text = of_op(tmp_path, *rows, *(row | {"device": "NVIDIA L40S", "cold_speedup": 0.5} for row in rows))
    assert text.count("| M | Problems |") == 2
    assert "**NVIDIA H200 · `minfer.matmul` · seed 7**" in text and "**NVIDIA L40S · `minfer.matmul` · seed 7**" in text


def test_an_interval_that_is_too_wide_gives_no_ratio(tmp_path: Path) -> None:
    wide = {"cold_speedup_low": 0.1, "cold_speedup_high": 9.0}
    text = page(
        tmp_path, drawn("torch", 1, 100.0), function(1, 50.0, **wide), drawn("torch", 2, 100.0), function(2, 50.0)
    )
    assert f"{ROW} | 7 | 1 | 2.00× | 2.00× | 100 % | 1 |" in text


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
    assert "+sweep=anywhere draw.problems=200" in of_op(tmp_path, row())
    assert "+sweep=anywhere draw.problems=200" in (tmp_path / "anywhere.md").read_text()


def test_beside_the_definition_alone_there_is_no_ratio(tmp_path: Path) -> None:
    text = of_op(
        tmp_path,
        *(drawn("torch_eager", m, 100.0) for m in (1, 2)),
        drawn("torch", 2, 100.0),
        function(1, 1.0, baseline="torch_eager"),
        function(2, 50.0),
    )
    assert "| all | 1 | 2.00× | 2.00× | 100 % |" in text
    assert "Without a ratio, 1: only torch_eager, the definition in several launches, was timed beside it" in text


def test_a_ratio_that_is_too_uncertain_is_not_shown_and_the_page_says_so(tmp_path: Path) -> None:
    text = of_op(
        tmp_path,
        *(drawn("torch", m, 100.0) for m in (1, 2, 3)),
        function(1, 50.0, cold_speedup_low=0.5, cold_speedup_high=5.0),
        function(2, 50.0),
        function(3, 1.0, status="wrong", message="3 of 64 elements", cold_us=None, cold_speedup=None),
    )
    assert "| all | 1 | 2.00× | 2.00× | 100 % |" in text
    assert "Without a ratio, 2: the interval of its ratio is too wide; wrong: 3 of 64 elements" in text


def test_the_figures_are_of_the_last_source_of_which_enough_problems_were_measured(tmp_path: Path) -> None:
    def shown(*counts: int) -> str:
        """The page where so many problems of seed 11 were measured, and later, with another kernel, of seed 7."""
        rows = []
        for seed, day, count in zip((11, 7), (20, 21), counts, strict=True):
            when = {"drawn": seed, "finished": datetime(2026, 11, day, tzinfo=UTC), "source": f"kernels of {seed}"}
            for m in range(count):
                rows += [drawn("torch", 100 * seed + m, 100.0, **when), function(100 * seed + m, 50.0, **when)]
        return of_op(tmp_path, *rows)

    for counts, seed in (((9, 5), 7), ((9, 4), 11), ((4, 3), 7), ((5, 3), 11), ((0, 1), 7)):
        text = shown(*counts)
        count = counts[0] if seed == 11 else counts[1]
        assert f"seed {seed}**" in text and f"| all | {count} | 2.00× | 2.00× | 100 % |" in text, counts


def test_seeds_that_were_timed_with_the_same_kernels_and_rules_count_together(tmp_path: Path) -> None:
    rows = []
    for seed, first, us in ((8, 0, 50.0), (9, 3, 25.0), (10, 6, 12.5)):
        when = {
            "drawn": seed,
            "finished": datetime(2026, 11, seed, tzinfo=UTC),
            "source": "old" if seed == 8 else "new",
        }
        for m in range(first, first + 3):
            rows += [drawn("torch", m, 100.0, **when), function(m, us, **when)]
    text = of_op(tmp_path, *rows)
    assert "seeds 9, 10**" in text and "| all | 6 | 5.66× | 4.00× | 100 % |" in text


def test_problems_beside_the_definition_alone_do_not_count_for_a_source(tmp_path: Path) -> None:
    first, later = (
        {"drawn": seed, "finished": datetime(2026, 11, 20 + seed, tzinfo=UTC), "source": f"kernels of {seed}"}
        for seed in (1, 2)
    )
    rows = [x for m in range(5) for x in (drawn("torch", m, 100.0, **first), function(m, 50.0, **first))]
    rows += [x for m in range(5, 6) for x in (drawn("torch", m, 100.0, **later), function(m, 25.0, **later))]
    rows += [function(m, 10.0, baseline="torch_eager", **later) for m in range(6, 12)]
    assert "| all | 5 | 2.00× | 2.00× | 100 % |" in of_op(tmp_path, *rows)


def test_a_problem_whose_baseline_was_wrong_has_no_ratio(tmp_path: Path) -> None:
    wrong = drawn("torch", 2, 100.0, status="wrong", message="2 % of the elements", cold_us=None, cold_speedup=None)
    text = of_op(tmp_path, drawn("torch", 1, 100.0), wrong, function(1, 50.0), function(2, 10.0))
    assert "| all | 1 | 2.00× | 2.00× | 100 % |" in text
    assert "Without a ratio, 1: the baseline, torch, was wrong" in text


def test_what_decided_is_said_and_the_nearest_shape_has_figures_of_its_own(tmp_path: Path) -> None:
    preferred = "preferred at this shape, which was not measured"
    nearest = "v05_pipelined, the fastest of 3 at 8x64x64, the nearest shape measured: 9 us cold"
    text = of_op(
        tmp_path,
        *(drawn("torch", m, 100.0) for m in (1, 2, 3, 4)),
        function(1, 400.0, chosen=nearest),
        function(2, 100.0, chosen=nearest),
        function(3, 50.0, chosen=f"v18_fitted, {preferred}, by models of the times: v18_fitted 9 us"),
        function(4, 50.0, chosen=f"v06_strips, {preferred}, by a rule, up_to_128_rows (preferred.py)"),
    )
    assert "m=1,n=64,k=64 | 0.250× | torch | v05_pipelined | the nearest shape measured |" in text
    assert "| v18_fitted | models |" in text and "| v06_strips | a rule |" in text
    assert (
        "Chosen by the nearest shape measured: 2 of 4 problems, 0.500× in the geometric mean, 0.250× at least, 50 % not slower."
        in text
    )


def test_the_readme_names_the_functions_with_the_most_problems(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(OF_OP)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "anywhere.md").write_text(PAGE)
    rows = [drawn("torch", m, 100.0) for m in (1, 2)] + [function(1, 50.0), function(2, 200.0)]
    for number in range(anywhere.NAMED):
        rows += of(f"op{number}", f"function{number}", "float32//n=1", 50.0)
    store.write(store.to_table(rows), tmp_path / "rows.parquet")
    where = ["anywhere", "--results", str(tmp_path), "--readme", str(readme)]
    assert make.main([*where, "--check"]) == 1
    assert make.main(where) == make.main([*where, "--check"]) == 0
    text = readme.read_text()
    assert "problems: `minfer.matmul` 1.00× (0.500×, 2 problems), `minfer.function0` 2.00× (2.00×, 1 problem), " in text
    assert "`minfer.function2` 2.00×" in text and "function3`" not in text.partition("\n\n![")[0]
    assert "](docs/plots/nvidia-h200/anywhere-functions.svg)" in text
    store.write(store.to_table([row("torch", 100.0)]), tmp_path / "rows.parquet")  # no drawn problem any more
    assert make.main([*where, "--check"]) == 1
    assert make.main(where) == make.main([*where, "--check"]) == 0
    assert "No rows yet" in readme.read_text() and "matmul" not in readme.read_text()
