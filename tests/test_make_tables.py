"""The README's tables from real parquet: what is shown, what wins, what is refused."""

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
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from analysis import make_tables
from minfer import store

ROOT = Path(__file__).resolve().parents[1]
H200, EPYC = "NVIDIA H200", "AMD EPYC 9654"
TN = "layout=TN,accumulate=float32"
MARKERS = f"{make_tables.BEGIN}\n{make_tables.END}\n"
NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


def row(kernel: str = "torch", us: float | None = 100.0, problem: str = "", **values: Any) -> store.Row:
    """A row of hgemm on an H200: `us` is both regimes' median, the baseline takes 100 µs and the problem 10^9 FLOPs."""
    problem = problem or f"float16/{TN}/m=512,n=512,k=512"
    op = values.get("op", "hgemm")
    made: store.Row = {"run": "r1", "finished": NOON, "case": f"{op}/{kernel}/{problem}", "op": op, "kernel": kernel}
    made |= {"status": "ok", "baseline": "torch", "flops": 1e9, "device": H200, "device_kind": "cuda"}
    made |= {"commit": "6738d94f00aabbccddee", "torch": "2.11.0", "driver": "580.95.05"}
    if us is not None:
        for regime in ("cold", "steady"):
            made |= {f"{regime}_us": us, f"{regime}_tflops": 1e9 / us / 1e6, f"{regime}_speedup": 100 / us}
    return made | values


class Workspace:
    """A results folder and a README in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.results, self.readme = folder / "results", folder / "README.md"
        self.results.mkdir()
        self.readme.write_text(MARKERS)

    def write(self, *rows: store.Row, name: str = "a") -> Path:
        path = self.results / f"{name}.parquet"
        store.write(store.to_table(rows), path)
        return path

    def run(self, *arguments: object) -> int:
        where = ["--results", self.results, "--readme", self.readme]
        return make_tables.main([str(argument) for argument in [*where, *arguments]])

    def tables(self) -> list[list[list[str]]]:
        """The cells of every table, header included, as they stand in the file."""
        tables: list[list[list[str]]] = [[]]
        for line in self.readme.read_text().splitlines():
            if line.startswith("|"):
                tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
            elif tables[-1]:
                tables.append([])
        return [[table[0], *table[2:]] for table in tables if table]

    def cells(self, *rows: store.Row) -> list[list[str]]:
        """The body of the first table that is made of `rows`."""
        self.write(*rows)
        assert self.run() == 0
        return self.tables()[0][1:]


@pytest.fixture
def work(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


GOLDEN = f"""# minfer

<!-- results:begin -->

{make_tables.LEGEND}

### hgemm on NVIDIA H200

6 cases, finished 2026-03-01 to 2026-03-02; runs r1, r2; commit 6738d94f00aa; PyTorch version 2.11.0; driver 580.95.05.

**float16 · layout=TN, accumulate=float32 · m=4096, n=4096, k=4096 · cold**

| Kernel | Time | Throughput (TFLOP/s) | % of PyTorch throughput | Speed-up vs. baseline |
| :-- | --: | --: | --: | :-- |
| torch | 100.0 µs | 10.00 | 100.0 % | baseline |
| v01_naive † | 8.130 ms | 0.1230 | 1.23 % | 0.0123× |
| **v02_tiled** | **96.97 µs** | **10.31** | **103.1 %** | **1.031× (1.028–1.034)** |
| v03_wmma | crashed | — | — | signal 11 |

**float16 · layout=TN, accumulate=float32 · m=4096, n=4096, k=4096 · steady**

| Kernel | Time | Throughput (TFLOP/s) | % of PyTorch throughput | Speed-up vs. baseline |
| :-- | --: | --: | --: | :-- |
| **torch** | **100.0 µs** | **10.00** | **100.0 %** | **baseline** |
| v01_naive | 8.130 ms | 0.1230 | 1.23 % | 0.0123× |
| v02_tiled | 100.1 µs | 9.990 | 99.9 % | 0.999× tie |
| v03_wmma | crashed | — | — | signal 11 |

† unconverged: correct, and timed, but the time cap came before the precision asked for.

Not run, 1 unsupported: v04_wgmma (needs sm_90a, this GPU is sm_89).

<details>
<summary>All 2 problems</summary>

**float16 · layout=TN, accumulate=float32 · m=512, n=512, k=512 · cold**

| Kernel | Time | Throughput (TFLOP/s) | % of PyTorch throughput | Speed-up vs. baseline |
| :-- | --: | --: | --: | :-- |
| **torch** | **5.000 µs** | **—** | **100.0 %** | **baseline** |

**float16 · layout=TN, accumulate=float32 · m=4096, n=4096, k=4096 · cold**
"""


def test_golden(work: Workspace) -> None:
    big = f"float16/{TN}/m=4096,n=4096,k=4096"
    work.readme.write_text(f"# minfer\n\n{MARKERS}")
    fast: dict[str, Any] = {"cold_speedup_low": 1.0284, "cold_speedup_high": 1.0341, "steady_us": 100.1}
    work.write(
        row("v02_tiled", 96.97, big, **fast, steady_tflops=9.99, steady_speedup=0.999, steady_verdict="tie"),
        row("v01_naive", 8130.0, big, status="unconverged", run="r2", finished=NOON + dt.timedelta(days=1)),
        row("torch", 100.0, big),
        row("v03_wmma", None, big, status="crashed", message="signal 11"),
        row("v04_wgmma", None, big, status="unsupported", message="needs sm_90a, this GPU is sm_89"),
        row("torch", None, cold_us=5.0),
    )
    assert work.run() == 0
    text = work.readme.read_text()
    assert text.startswith(GOLDEN)
    headline = GOLDEN[GOLDEN.index("**float16") : GOLDEN.index("<details>")]
    assert text == GOLDEN[: GOLDEN.rindex("**float16")] + headline + "</details>\n\n<!-- results:end -->\n"


def test_newest_row_wins_whatever_the_file_order(work: Workspace) -> None:
    later = NOON + dt.timedelta(microseconds=1)
    work.write(row(us=2.0, finished=later, run="r0"), row("v01", 7.0), name="a")
    work.write(row(us=1.0), row("v01", 8.0, finished=later), row("v01", 9.0, finished=None), name="b")
    assert work.run() == 0
    assert [cells[1] for cells in work.tables()[0][1:]] == ["**2.000 µs**", "8.000 µs"]


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


def test_sections_are_by_op_then_gpus_before_cpus(work: Workspace) -> None:
    cpu: dict[str, Any] = {"device": EPYC, "device_kind": "cpu"}
    work.write(row(op="rope"), row(**cpu), row(device=None, device_kind=None), row(), row(device="NVIDIA A100"))
    assert work.run() == 0
    titles = [line for line in work.readme.read_text().splitlines() if line.startswith("###")]
    hgemm = ["NVIDIA A100", H200, EPYC, "unknown device"]
    assert titles == [f"### hgemm on {name}" for name in hgemm] + [f"### rope on {H200}"]


def test_best_is_the_fastest_measured_kernel_of_each_regime(work: Workspace) -> None:
    work.write(
        row("torch", 10.0),
        row("v01", 9.0, steady_us=11.0),
        row("v02", 1.0, status="wrong"),
        row("v10", 12.0),
        row("v9", 9.5),
    )
    assert work.run() == 0
    bold = [[cells[0] for cells in table if cells[1].startswith("**")] for table in work.tables()]
    assert bold == [["**v01**"], ["**v9**"]]
    assert all(
        all(c.startswith("**") for c in cells) == cells[0].startswith("**") for t in work.tables() for cells in t
    )


def test_kernels_are_in_ladder_order(work: Workspace) -> None:
    names = ["torch", "v1", "v2", "v10", "cpu_naive", "triton_tiled"]
    assert [cells[0].strip("*") for cells in work.cells(*map(row, reversed(names)))] == names


def test_problems_are_in_numerical_order_and_the_headline_is_the_best_covered(work: Workspace) -> None:
    shapes = [f"float16/{TN}/m={m},n=8" for m in (8, 64, 512, 1024)]
    flops = {shape: 1e6 * i for i, shape in enumerate(shapes)}
    rows = [row(name, 10.0, shape, flops=flops[shape]) for shape in shapes[:3] for name in ("torch", "v01")]
    # the largest problem has three kernels too, but only one that was measured
    failed = [row(name, None, shapes[3], status="error", message="no", flops=1e12) for name in ("v01", "v02", "v03")]
    work.write(*reversed(rows), row("torch", 10.0, shapes[3], flops=1e12), *failed)
    assert work.run() == 0
    lines = [line for line in work.readme.read_text().splitlines() if line.endswith("cold**")]
    assert [line.split("m=")[1].split(",")[0] for line in lines] == ["512", "8", "64", "512", "1024"]


def test_representative_problem_by_name_when_all_else_is_equal(work: Workspace) -> None:
    work.write(*(row(problem=f"float16/{TN}/m={m}") for m in (1024, 64, 512)))
    assert work.run() == 0
    assert "m=64 · cold" in work.readme.read_text().split("<details>")[0]


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0.01234567, "0.01235 µs"),
        (9.9996, "10.00 µs"),
        (999.94, "999.9 µs"),
        (999.96, "1.000 ms"),
        (1234567, "1235 ms"),
    ],
)
def test_times_have_four_digits_and_a_sensible_unit(us: float, text: str) -> None:
    assert make_tables.duration(us) == text


def test_percent_is_the_paired_ratio_not_that_of_medians(work: Workspace) -> None:
    cells = work.cells(row(us=100.0), row("v01", 50.0, cold_speedup=0.5314))
    assert cells[1][3:] == ["**53.1 %**", "**0.531×**"]


def test_another_baseline_than_torch(work: Workspace) -> None:
    rows = [
        row("torch", 100.0, cold_speedup=4.0),
        row("v01", 400.0, cold_speedup=1.0),
        row("v02", 200.0, cold_speedup=2.0),
    ]
    cells = work.cells(*(made | {"baseline": "v01"} for made in rows))
    assert [line[3].strip("*") for line in cells] == ["100.0 %", "25.0 %", "50.0 %"]
    assert [line[4].strip("*") for line in cells] == ["4.000×", "baseline", "2.000×"]


def test_two_baselines_in_one_table_are_named(work: Workspace) -> None:
    cells = work.cells(row("torch"), row("v01", 80.0), row("v02", 50.0, baseline="v01", cold_speedup=1.6))
    assert [line[4].strip("*") for line in cells] == ["baseline", "1.250× over torch", "1.600× over v01"]
    assert cells[2][3] == "**200.0 %**"


def test_tie_is_said_and_other_verdicts_are_not(work: Workspace) -> None:
    interval: dict[str, Any] = {"cold_speedup_low": 0.5288, "cold_speedup_high": 0.5341}
    rows = [row(name, 188.3, cold_verdict=name, **interval) for name in ("slower", "tie")]
    assert [line[4] for line in work.cells(row(), *rows)][1:] == ["0.531× (0.529–0.534)", "0.531× (0.529–0.534) tie"]


def test_kernel_that_others_were_compared_with_is_the_baseline(work: Workspace) -> None:
    cells = work.cells(row(baseline=None, cold_speedup=None), row("v01", 5.0, cold_speedup_low=19.0))
    assert [line[4].strip("*") for line in cells] == ["baseline", "20.00×"]


def test_without_pytorch_there_is_no_percentage(work: Workspace) -> None:
    cells = work.cells(row("torch", None, status="oom"), row("v01", 5.0, baseline=None, cold_speedup=None))
    assert cells[1] == ["**v01**", "**5.000 µs**", "**200.0**", "**—**", "**—**"]


def test_regime_that_nobody_has_is_skipped(work: Workspace) -> None:
    work.write(row("torch", None, steady_us=5.0), row("v01", None, status="ok"))
    assert work.run() == 0
    assert "· cold**" not in work.readme.read_text()
    assert [cells[1] for cells in work.tables()[0][1:]] == ["**5.000 µs**", "—"]


def test_failed_cases_show_status_and_short_message(work: Workspace) -> None:
    rows = [
        row(s, None, status=s, message=f"{s} because\n of" + " x" * 200)
        for s in store.STATUSES
        if s not in store.MEASURED
    ]
    cells = work.cells(row(), *rows)[1:]
    assert {line[1] for line in cells} == set(store.STATUSES) - {*store.MEASURED, "unsupported"}
    for line in cells:
        assert line[4].startswith(f"{line[1]} because of x") and line[4].endswith("…") and len(line[4]) <= 100
    skipped = next(line for line in work.readme.read_text().splitlines() if line.startswith("Not run"))
    assert skipped.startswith("Not run, 1 unsupported: unsupported (unsupported because of x")
    assert skipped.endswith("…).") and len(skipped) <= 150


def test_failed_cases_never_show_a_time(work: Workspace) -> None:
    assert work.cells(row(), row("v01", 1.0, status="wrong", message="no"))[1] == ["v01", "wrong", "—", "—", "no"]


def test_problem_that_nobody_timed_or_supports(work: Workspace) -> None:
    other = f"float16/{TN}/m=1"
    work.write(
        row(us=None, status="timeout", message="late"), row("v01", None, other, status="unsupported", message="no")
    )
    assert work.run() == 0
    text = work.readme.read_text()
    assert work.tables()[0][1:] == [["torch", "timeout", "—", "—", "late"]]
    assert (
        "k=512 · not timed**" in text
        and "Not run: 1 problem that no kernel here supports." in text
        and "m=1" not in text
    )


def test_only_unconverged_rows_have_a_dagger_and_a_footnote(work: Workspace) -> None:
    assert [cells[0] for cells in work.cells(row(), row("v01", 200.0, status="unconverged"))] == ["**torch**", "v01 †"]
    assert work.readme.read_text().count("\n† unconverged") == 1
    work.write(row(), row("v01", 200.0))
    assert work.run() == 0
    assert "†" not in work.readme.read_text()


def test_rows_without_identity_are_counted_and_null_columns_do_no_harm(
    work: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = dict.fromkeys(row()) | {name: row()[name] for name in ("case", "op", "kernel", "status")}
    lacking = [row("v01") | {name: None} for name in ("case", "op", "kernel", "status")]
    assert work.cells(bare, *lacking, {}) == [["torch", "—", "—", "—", "—"]]
    assert capsys.readouterr().err == "5 rows lack one of case, op, kernel, status and are left out\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_impossible_numbers_are_not_shown(work: Workspace, value: float) -> None:
    cells = work.cells(row(), row("v01", 5.0, cold_tflops=value, cold_speedup=value), row("v02", 5.0, cold_us=value))
    assert cells[1:] == [["**v01**", "**5.000 µs**", "**—**", "**2000 %**", "**—**"], ["v02", "—", "—", "—", "—"]]


def test_many_problems_are_capped_and_counted(work: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tables, "MOST_PROBLEMS", 7)  # for two sections, so three each
    problems = [f"float16/{TN}/m={m}" for m in range(10)]
    work.write(*(row(problem=p, flops=i, device=d) for i, p in enumerate(problems, 1) for d in (H200, EPYC)))
    assert work.run() == 0
    text = work.readme.read_text()
    assert text.count("The first 3 of 10 problems") == text.count("7 more problems are in the parquet files only.") == 2
    assert [text.count(f"m={m} · cold") for m in range(10)] == [2, 2, 2, 0, 0, 0, 0, 0, 0, 2]  # m=9 is the headline


def test_many_runs_are_counted_and_few_are_named(work: Workspace) -> None:
    work.write(*(row(f"v{i}", run=f"r{i}", commit=f"{(i + 1) % 2}") for i in range(9)))
    assert work.run() == 0
    assert "9 cases, finished 2026-03-01; 9 runs; commits 0, 1; PyTorch" in work.readme.read_text()


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
    assert "1 case," in work.readme.read_text() and work.tables()[0][1][1] == "**5.000 µs**"
    assert work.run(path, work.results / "absent.parquet") == 1
    assert "absent.parquet: " in capsys.readouterr().err


def test_check_writes_nothing_and_says_what_to_run(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    work.write(row())
    assert work.run("--check") == 1
    assert capsys.readouterr().err == f"{work.readme} is out of date: run `python analysis/make_tables.py`\n"
    assert work.readme.read_text() == MARKERS
    assert work.run() == 0
    assert work.run("--check") == 0
    assert capsys.readouterr().err == ""
    work.readme.write_text(work.readme.read_text().replace("100.0 µs", "99.0 µs"))
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
        texts.add(work.readme.read_text())
    assert len(texts) == 1
    assert "11.00 µs" in texts.pop()  # r2


HOSTILE = st.text(
    st.one_of(st.sampled_from("|\\`*_~<>[]()!&#$-:\r\n\t †\x00\u2028"), st.characters(codec="utf-8")), max_size=30
)


MARKDOWN = "<b>x</b> &lt; [a](b) ~~x~~ _x_ `x` **x** | \\| <!-- results:end -->"  # every construct, surely tried


def shown(text: str) -> str:
    """What a reader should see of a text: the same, in one line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split()) or "—"


def inline_text(token: Token) -> str:
    """The text of a rendered cell; anything but text, such as a link, an image, code or HTML, is a failure."""
    children = token.children or []
    assert {child.type for child in children} <= {"text", "strong_open", "strong_close", "text_special"}
    assert len([child for child in children if child.type == "strong_open"]) <= 1
    return "".join(child.content for child in children)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kernel=HOSTILE, message=HOSTILE)
@example(kernel=MARKDOWN, message=MARKDOWN)
def test_no_text_of_a_row_can_break_the_table(work: Workspace, kernel: str, message: str) -> None:
    kernel = kernel if kernel != "torch" else "other"
    best = row("zz", 50.0) | {"kernel": f"z{kernel}"}
    work.write(row(), best, row(None, None, status="error", message=message) | {"kernel": kernel})  # type: ignore[arg-type]
    assert work.run() == 0
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(work.readme.read_text())
    assert [token.type for token in tokens].count("table_open") == 2
    cells = [inline_text(tokens[i + 1]) for i, token in enumerate(tokens) if token.type in ("td_open", "th_open")]
    assert len(cells) == 2 * 5 * 4  # two tables of a header and three rows
    body = [cells[i : i + 5] for i in range(5, 20, 5)]
    assert ["torch", "100.0 µs", "10.00", "100.0 %", "baseline"] in body
    assert [shown(f"z{kernel}"), "50.00 µs", "20.00", "200.0 %", "2.000×"] in body
    assert [shown(kernel), "error", "—", "—", shown(message)] in body


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=HOSTILE)
def test_no_other_text_can_either(work: Workspace, text: str) -> None:
    names = dict.fromkeys(("device", "run", "commit", "torch", "driver", "baseline", "device_kind", "message"), text)
    work.write(row("v01", 5.0, f"{text}/{text}/{text}", op="o" + text, **names), row("v02", None, status=text, **names))
    assert work.run() == 0
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(work.readme.read_text())
    kinds = {token.type for token in tokens}
    assert kinds <= {
        f"{tag}_{end}"
        for tag in ("table", "thead", "tbody", "tr", "th", "td", "heading", "paragraph")
        for end in ("open", "close")
    } | {"inline", "html_block"}
    assert sum(token.type == "html_block" for token in tokens) in (2, 5)  # the markers, and perhaps details
    for token in tokens[8:]:
        assert token.type != "inline" or inline_text(token)


def test_runs_as_a_script_from_anywhere_without_torch(work: Workspace) -> None:
    work.write(row())
    script = str(ROOT / "analysis" / "make_tables.py")
    code = f"import runpy, sys; sys.argv = {[script, '--results', str(work.results), '--readme', str(work.readme)]!r}\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit as end: assert end.code == 0, end.code\n"
    code += "assert 'torch' not in sys.modules"
    environment = {"PATH": ""}  # and so without PYTHONPATH
    subprocess.run([sys.executable, "-c", code], cwd=work.results, env=environment, check=True, timeout=60)
    assert "### hgemm on NVIDIA H200" in work.readme.read_text()
