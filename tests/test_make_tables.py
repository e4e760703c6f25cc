"""The README's table of ops and the pages behind it from real parquet: which rows are shown, where, and what is refused."""

from __future__ import annotations

import datetime as dt
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import check_figures, make_tables
from analysis.pages import GENERATED
from analysis.sections import OPS_LEGEND, REST
from analysis.tables import LEGEND
from minfer.rows import store
from tests.tables import EPYC, H200, MARKERS, NOON, TN, Workspace, other, row

ROOT = Path(__file__).resolve().parents[1]

HEADLINE = (
    "float16 · layout=TN, accumulate=float32 · m=4096, n=4096, k=4096: of PyTorch's throughput **v02_tiled** reaches"
    " 103.1 % (102.8–103.4) cold and 99.9 %, a tie, steady."
)
README = f"""# minfer

<!-- headline:begin -->

NVIDIA H200, hgemm (float16 · layout=TN, accumulate=float32 · m=n=k=4096): **v02_tiled** reaches 103.1 % (102.8–103.4) cold and 99.9 %, a tie, steady of PyTorch's throughput.

<!-- headline:end -->

<!-- results:begin -->

{OPS_LEGEND}

**NVIDIA H200**

| Op | Fastest of ours | Problem | % of PyTorch, cold | % of PyTorch, steady | % of the best other, cold | All problems | Tables |
| :-- | :-- | :-- | :-- | :-- | :-- | :-- | :-- |
| hgemm | v02_tiled | float16 · layout=TN, accumulate=float32 · m=n=k=4096 | 103.1 % (102.8–103.4) | 99.9 % tie | — | 1 faster | [2 problems](docs/results/nvidia-h200/hgemm.md) |

<!-- results:end -->
"""  # noqa: E501
PAGE = f"""{GENERATED}

# hgemm on NVIDIA H200

6 cases, finished 2026-03-01 to 2026-03-02; runs r1, r2; commit 6738d94f00aa; PyTorch version 2.11.0; driver 580.95.05.

{LEGEND}

{HEADLINE}

**float16 · layout=TN, accumulate=float32 · m=4096, n=4096, k=4096 · cold**

| Kernel | Time | Throughput (TFLOP/s) | % of PyTorch throughput | Speed-up vs. v01_naive |
| :-- | --: | --: | :-- | --: |
| torch | 100.0 µs | 10.00 | 100.0 % | 81.3× |
| v01_naive † | 8.130 ms | 0.1230 | 1.23 % | baseline |
| **v02_tiled** | **96.97 µs** | **10.31** | **103.1 % (102.8–103.4)** | **83.8×** |
| v03_wmma | crashed | — | — | signal 11 |

**float16 · layout=TN, accumulate=float32 · m=4096, n=4096, k=4096 · steady**

| Kernel | Time | Throughput (TFLOP/s) | % of PyTorch throughput | Speed-up vs. v01_naive |
| :-- | --: | --: | :-- | --: |
| **torch** | **100.0 µs** | **10.00** | **100.0 %** | **81.3×** |
| v01_naive | 8.130 ms | 0.1230 | 1.23 % | baseline |
| **v02_tiled** | **100.1 µs** | **9.990** | **99.9 % tie** | **81.2×** |
| v03_wmma | crashed | — | — | signal 11 |

† unconverged: correct, and timed, but the time cap came before the precision asked for.

Not run, 1 unsupported: v04_wgmma (needs sm_90a, this GPU is sm_89).

**squares · float16 · layout=TN, accumulate=float32 · cold, TFLOP/s**

| Kernel | 512 | 4096 | Speed-up over torch, geometric mean |
| :-- | --: | --: | --: |
| torch | **—** | 10.00 | 1.00× |
| v01_naive | — | 0.1230 | — |
| v02_tiled | — | **10.31** | — |

{REST}

**float16 · layout=TN, accumulate=float32 · m=512, n=512, k=512 · cold**

| Kernel | Time | Throughput (TFLOP/s) | % of PyTorch throughput | Speed-up vs. baseline |
| :-- | --: | --: | :-- | --: |
| **torch** | **5.000 µs** | **—** | **100.0 %** | **—** |
"""


def test_golden(work: Workspace) -> None:
    big = f"float16/{TN}/m=4096,n=4096,k=4096"
    work.readme.write_text(f"# minfer\n\n<!-- headline:begin -->\n<!-- headline:end -->\n\n{MARKERS}")
    fast: dict[str, Any] = {"cold_speedup_low": 1.0284, "cold_speedup_high": 1.0341, "steady_us": 100.1}
    work.write(
        row(
            "v02_tiled",
            96.97,
            big,
            **fast,
            steady_tflops=9.99,
            steady_speedup=0.999,
            steady_verdict="tie",
            cold_verdict="faster",
        ),
        row("v01_naive", 8130.0, big, status="unconverged", run="r2", finished=NOON + dt.timedelta(days=1)),
        row("torch", 100.0, big),
        row("v03_wmma", None, big, status="crashed", message="signal 11"),
        row("v04_wgmma", None, big, status="unsupported", message="needs sm_90a, this GPU is sm_89"),
        row("torch", None, cold_us=5.0),
    )
    assert work.run() == 0
    assert work.readme.read_text() == README
    assert work.page() == PAGE


def test_newest_row_wins_whatever_the_file_order(work: Workspace) -> None:
    later = NOON + dt.timedelta(microseconds=1)
    work.write(row(us=2.0, finished=later, run="r0"), row("v01", 7.0), name="a")
    work.write(row(us=1.0), row("v01", 8.0, finished=later), row("v01", 9.0, finished=None), name="b")
    assert work.run() == 0
    assert [cells[1].strip("*") for cells in work.tables()[0][1:]] == ["2.000 µs", "8.000 µs"]


def test_of_equally_new_rows_the_last_run_wins_and_then_the_last_file(work: Workspace) -> None:
    runs = {"a": (1.0, "r1"), "b": (2.0, "r2"), "c": (3.0, "r0")}
    paths = [work.write(row(us=us), row("v01", us, run=run), name=name) for name, (us, run) in runs.items()]
    for order in (paths, paths[::-1]):
        assert work.run(*order) == 0
        assert [cells[1].strip("*") for cells in work.tables()[0][1:]] == ["3.000 µs", "2.000 µs"]


def test_newest_row_wins_also_when_it_failed(work: Workspace) -> None:
    later = NOON + dt.timedelta(hours=1)
    cells = work.cells(row(us=2.0), row(us=None, status="oom", message="out of memory", finished=later))
    assert cells == [["torch", "oom", "—", "—", "out of memory"]]


def test_a_case_counts_once_for_each_device(work: Workspace) -> None:
    work.write(row(us=2.0), row(us=3.0, device="NVIDIA L40S", finished=NOON + dt.timedelta(hours=1)))
    assert work.run() == 0
    assert [table[1][1] for table in work.tables()] == ["**2.000 µs**"] * 2 + ["**3.000 µs**"] * 2


def ops_shown(text: str) -> list[str]:
    """The device of a table of ops, and its ops."""
    lines = [line for line in text.splitlines() if line.startswith(("**", "| "))]
    names = [line.strip("*") if line.startswith("**") else line.split(" | ")[0].strip("| ") for line in lines]
    return [name for name in names if name not in ("Op", ":--")]


def test_the_readme_has_the_gpu_with_most_rows_and_links_to_the_others(work: Workspace) -> None:
    cpu: dict[str, Any] = {"device": EPYC, "device_kind": "cpu"}
    work.readme.write_text(f"<!-- headline:begin -->\n<!-- headline:end -->\n{MARKERS}")
    many = [row(name, op="rope", **cpu) for name in ("torch", "v01", "v02")]
    work.write(*many, row(op="rope"), row("v01"), row(), row(device=None, device_kind=None), row(device="NVIDIA A100"))
    assert work.run() == 0
    readme = work.readme.read_text()
    assert ops_shown(readme) == [H200, "hgemm", "rope"]
    assert "NVIDIA H200, hgemm (float16" in readme
    said = "The same table of other devices: [NVIDIA A100](docs/results/nvidia-a100/README.md), [AMD EPYC 9654]("
    assert f"{said}docs/results/amd-epyc-9654/README.md), [unknown device]" in readme
    other = work.pages / "amd-epyc-9654" / "README.md"
    assert ops_shown(other.read_text()) == [EPYC, "rope"]
    assert "[1 problem](../amd-epyc-9654/rope.md)" in other.read_text()
    assert check_figures.main([str(work.readme), *map(str, work.pages.glob("*/*.md"))]) == 0


def test_problems_are_in_numerical_order_and_the_headline_is_the_best_covered(work: Workspace) -> None:
    shapes = [f"float16/{TN}/m={m},n=8" for m in (8, 64, 512, 1024)]
    flops = {shape: 1e6 * i for i, shape in enumerate(shapes)}
    rows = [row(name, 10.0, shape, flops=flops[shape]) for shape in shapes[:3] for name in ("torch", "v01")]
    # the largest problem has three kernels too, but only one that was measured
    failed = [row(name, None, shapes[3], status="error", message="no", flops=1e12) for name in ("v01", "v02", "v03")]
    work.write(*reversed(rows), row("torch", 10.0, shapes[3], flops=1e12), *failed)
    assert work.run() == 0
    shown = [
        [line.split("m=")[1].split(",")[0] for line in text.splitlines() if line.endswith("cold**")]
        for text in (work.text(), work.page())
    ]
    assert shown == [["512"], ["512", "8", "64", "1024"]]
    assert "· m=512, n=8 |" in work.readme.read_text()


def test_representative_problem_by_name_when_all_else_is_equal(work: Workspace) -> None:
    work.write(*(row(problem=f"float16/{TN}/m={m}") for m in (1024, 64, 512)))
    assert work.run() == 0
    assert "m=64 · cold" in work.text()


def test_without_flops_the_representative_problem_is_that_with_most_bytes(work: Workspace) -> None:
    problems = [f"int32//tokens={tokens},experts=8" for tokens in (1, 16, 256)]
    for flops in (0.0, None):
        work.write(
            *(
                other("route", "tokens/s", "torch", 9.0, problem, flops=flops, bytes=nbytes)
                for problem, nbytes in zip(problems, (10.0, 1000.0, 100.0), strict=True)
            )
        )
        assert work.run() == 0
        assert "**int32 · tokens=16, experts=8 · cold**" in work.text()


def test_many_problems_are_capped_and_counted(work: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tables, "MOST_PROBLEMS", 4)
    problems = [f"float16/{TN}/m={m}" for m in range(10)]
    work.write(*(row(problem=p, flops=i, device=d) for i, p in enumerate(problems, 1) for d in (H200, EPYC)))
    assert work.run() == 0
    assert work.readme.read_text().count("| [10 problems](docs/results/") == 1
    for device in (H200, EPYC):
        text = work.page(device)
        assert text.count("\n6 more problems are in the parquet files only.") == 1
        assert [text.count(f"m={m} · cold") for m in range(10)] == [1, 1, 1, 0, 0, 0, 0, 0, 0, 1]  # 9: the headline


def test_the_pages_lie_beside_the_readme_that_is_written(work: Workspace) -> None:
    work.write(row(), row(problem=f"float16/{TN}/m=8,n=8,k=8"))
    assert make_tables.main(["--results", str(work.results), "--readme", str(work.readme)]) == 0
    assert "# hgemm on NVIDIA H200" in work.page()


def test_a_page_that_nothing_stands_behind_goes_and_others_stay(
    work: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    work.write(row(), row(problem=f"float16/{TN}/m=8,n=8,k=8"))
    assert work.run() == 0
    page = work.page()
    theirs = work.pages / "notes" / "mine.md"
    theirs.parent.mkdir()
    theirs.write_text("# Mine\n")
    old = work.pages / "nvidia-h200" / "rope.md"
    old.write_text(page)
    assert work.run("--check") == 1
    assert capsys.readouterr().err == f"{old} is out of date: run `python analysis/make_tables.py`\n"
    assert old.exists()
    assert work.run() == 0
    assert not old.exists() and theirs.exists() and work.page() == page
    (work.pages / "nvidia-h200" / "hgemm.md").write_text(page.replace("10.00", "11.00"))
    assert work.run("--check") == 1


def test_many_runs_are_counted_and_few_are_named(work: Workspace) -> None:
    work.write(*(row(f"v{i}", run=f"r{i}", commit=f"{(i + 1) % 2}") for i in range(9)))
    assert work.run() == 0
    assert "9 cases, finished 2026-03-01; 9 runs; commits 0, 1; PyTorch" in work.text()


def bad_files(work: Workspace) -> Iterator[Path]:
    whole = work.write(row("v01"), name="whole").read_bytes()
    contents = {"truncated": whole[: len(whole) // 2], "headless": whole[200:], "text": b"not parquet", "empty": b""}
    (work.results / "whole.parquet").unlink()
    for name, content in contents.items():
        path = work.results / f"{name}.parquet"
        path.write_bytes(content)
        yield path
    path = work.results / "foreign.parquet"
    pq.write_table(pa.table({"x": [1]}), path)
    yield path


def test_bad_files_are_named_and_skipped(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    bad = list(bad_files(work))
    work.write(row(us=5.0))
    assert work.run() == 1
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.partition(": ")[0] for line in lines) == sorted(map(str, bad))
    assert all(line.endswith("; skipped") and len(line) > len(f"{bad[0]}: ; skipped") for line in lines)
    assert work.tables()[0][1][1] == "**5.000 µs**"
    assert work.run("--check") == 1
    assert "out of date" not in capsys.readouterr().err


def test_only_bad_files_leave_the_readme_alone(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    work.readme.write_text(f"{make_tables.BEGIN}\nprecious\n{make_tables.END}\n")
    bad = len(list(bad_files(work)))
    assert work.run() == 1
    assert "precious" in work.readme.read_text()
    assert len(capsys.readouterr().err.splitlines()) == bad + 1


def test_no_results(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert work.run() == 0
    assert "No results yet" in work.readme.read_text()
    assert work.run("--results", work.results / "absent") == 1
    error = capsys.readouterr().err
    assert "absent is not a folder" in error and error.count("\n") == 1


def test_named_files_replace_the_search(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    work.write(row(us=1.0), name="a")
    path = work.write(row(us=5.0), name="b")
    assert work.run(path, path, "--results", "absent") == 0
    assert "1 case," in work.text() and work.tables()[0][1][1] == "**5.000 µs**"
    assert work.run(path, work.results / "absent.parquet") == 1
    assert "absent.parquet: " in capsys.readouterr().err


def test_check_writes_nothing_and_says_what_to_run(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    work.write(row())
    assert work.run("--check") == 1
    page = work.pages / "nvidia-h200" / "hgemm.md"
    why = "is out of date: run `python analysis/make_tables.py`\n"
    assert capsys.readouterr().err == f"{work.readme} {why}{page} {why}{page.with_name('README.md')} {why}"
    assert work.readme.read_text() == MARKERS and not page.exists()
    assert work.run() == 0
    assert work.run("--check") == 0
    assert capsys.readouterr().err == ""
    page.write_text(work.page().replace("100.0 µs", "99.0 µs"))
    assert work.run("--check") == 1
    assert work.run() == 0
    work.readme.write_text(work.readme.read_text().replace("[1 problem]", "[2 problems]"))
    assert work.run("--check") == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no markers",
        make_tables.BEGIN,
        f"{make_tables.END}\n{make_tables.BEGIN}\n",
        make_tables.BEGIN + MARKERS,
        MARKERS + make_tables.END,
    ],
)
def test_missing_or_doubled_markers(work: Workspace, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    work.write(row())
    work.readme.write_text(text)
    assert work.run() == 1
    assert work.readme.read_text() == text
    error = capsys.readouterr().err
    assert make_tables.BEGIN in error and make_tables.END in error and error.count("\n") == 1


def test_missing_or_unreadable_readme(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    work.write(row())
    work.readme.unlink()
    assert work.run() == 1
    assert capsys.readouterr().err == f"{work.readme}: No such file or directory\n"
    assert not work.readme.exists()
    work.readme.write_bytes(b"\xff" + MARKERS.encode())
    assert work.run() == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_text_outside_the_markers_is_untouched_and_a_second_run_changes_nothing(work: Workspace, newline: str) -> None:
    before, after = "# é | x\n\n \ttrailing  \n", "\n\nlast line without an end"
    old = f"{before}{make_tables.BEGIN}\nold tables\n{make_tables.END}{after}".replace("\n", newline)
    work.readme.write_bytes(old.encode())
    work.write(row(), row("v01", None, status="error", message=f"{make_tables.END} {make_tables.BEGIN}"))
    assert work.run() == 0
    new = work.readme.read_bytes()
    assert new.startswith((before.replace("\n", newline) + make_tables.BEGIN).encode())
    assert new.endswith((make_tables.END + after.replace("\n", newline)).encode())
    assert b"old tables" not in new
    assert new.count(b"\n") == new.count(newline.encode())
    assert work.run() == 0
    assert work.readme.read_bytes() == new


def test_output_does_not_depend_on_how_rows_are_spread_over_files(work: Workspace) -> None:
    rows = [
        row(kernel, 10.0 + i, f"{dtype}/{TN}/m={m}", run=run, device=device)
        for i, run in enumerate(("r1", "r2", None))  # all finished at once: the run's name decides
        for kernel in ("torch", "v01", "v02")
        for dtype in ("float16", "bfloat16")
        for m in (64, 512)
        for device in (H200, EPYC)
    ]
    texts = set()
    for seed in range(4):
        random.Random(seed).shuffle(rows)
        for i in range(3):
            work.write(*rows[i::3], name=str(i))
        assert work.run(*random.Random(seed).sample(store.files(work.results), 3)) == 0
        texts.add(work.readme.read_text() + work.page() + work.page(EPYC))
    assert len(texts) == 1
    assert "11.00 µs" in texts.pop()  # r2


def test_runs_as_a_script_from_anywhere_without_torch(work: Workspace) -> None:
    work.write(row())
    script = str(ROOT / "analysis" / "make_tables.py")
    where = ["--results", str(work.results), "--readme", str(work.readme), "--pages", str(work.pages)]
    code = f"import runpy, sys; sys.argv = {[script, *where]!r}\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit as end: assert end.code == 0, end.code\n"
    code += "assert 'torch' not in sys.modules"
    environment = {"PATH": "", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=work.results, env=environment, check=True, timeout=60)
    assert "# hgemm on NVIDIA H200" in work.page()
