"""The README's table of ops and the pages behind it from real parquet: which rows are shown, where, and what is refused."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest

from minfer.analysis import make_tables
from minfer.analysis.makers import figures, tables
from minfer.analysis.tables.pages import GENERATED
from minfer.analysis.tables.problem import LEGEND
from minfer.analysis.tables.sections import README_LEGEND, REST
from minfer.rows import store
from tests.tables import EPYC, H200, MARKERS, NOON, TN, Workspace, other, row

ROOT = Path(__file__).resolve().parents[2]

HEADLINE = (
    "float16 · layout=TN, accumulate=float32 · m=4096, n=4096, k=4096: of PyTorch's throughput **v02_tiled** reaches"
    " 103.1 % (102.8–103.4) cold and 99.9 %, a tie, steady."
)
README = f"""# minfer

<!-- headline:begin -->

NVIDIA H200, hgemm (float16 · layout=TN, accumulate=float32 · m=n=k=4096): **v02_tiled** reaches 103.1 % (102.8–103.4) cold and 99.9 %, a tie, steady of PyTorch's throughput.

| Kernel | Throughput (TFLOP/s) | % of PyTorch | Speed-up vs. v01_naive |
| :-- | --: | :-- | --: |
| torch | 10.00 | 100.0 % | 81.3× |
| v01_naive | 0.1230 | 1.23 % | baseline |
| **v02_tiled** | **10.31** | **103.1 % (102.8–103.4)** | **83.8×** |

Cold, as in the table: single calls with flushed caches. Steady: half a second of calls, at the clock where the card settles. Each rung is faster than all before it. [All kernels and problems](docs/results/nvidia-h200/hgemm.md).

<!-- headline:end -->

<!-- results:begin -->

{README_LEGEND}

**NVIDIA H200**

| Op | Largest problem | Ours, in % of the strongest other | All problems: faster, tie, slower |
| :-- | :-- | :-- | :-- |
| hgemm | float16 · layout=TN, accumulate=float32 · m=n=k=4096 | 103.1 % (102.8–103.4) of torch | [1 faster, 1 not compared](docs/results/nvidia-h200/hgemm.md) |

Steady calls too, with demonstrations, by device: [NVIDIA H200](docs/results/nvidia-h200/README.md).

<!-- results:end -->
"""  # noqa: E501
PAGE = f"""{GENERATED}

# hgemm on NVIDIA H200

6 cases, finished 2026-03-01 to 2026-03-02; runs r1, r2; commit 6738d94f00aa; PyTorch version 2.11.0; driver 580.95.05.

{LEGEND}

{HEADLINE}

**float16 · layout=TN, accumulate=float32 · m=4096, n=4096, k=4096 · cold**

| Kernel | Time (on PyTorch's clock) | Throughput (TFLOP/s) | % of PyTorch throughput | Speed-up vs. v01_naive |
| :-- | --: | --: | :-- | --: |
| torch | 100.0 µs | 10.00 | 100.0 % | 81.3× |
| v01_naive † | 8.130 ms | 0.1230 | 1.23 % | baseline |
| **v02_tiled** | **96.97 µs** | **10.31** | **103.1 % (102.8–103.4)** | **83.8×** |
| v03_wmma | crashed | — | — | signal 11 |

**float16 · layout=TN, accumulate=float32 · m=4096, n=4096, k=4096 · steady**

| Kernel | Time (on PyTorch's clock) | Throughput (TFLOP/s) | % of PyTorch throughput | Speed-up vs. v01_naive |
| :-- | --: | --: | :-- | --: |
| **torch** | **100.0 µs** | **10.00** | **100.0 %** | **81.3×** |
| v01_naive | 8.130 ms | 0.1230 | 1.23 % | baseline |
| **v02_tiled** | **100.1 µs** | **9.990** | **99.9 % tie** | **81.2×** |
| v03_wmma | crashed | — | — | signal 11 |

† unconverged: correct, and timed, but less precisely than asked for, or a judged time does not fit those inside.

Not run, 1 unsupported: v04_wgmma (needs sm_90a, this GPU is sm_89).

**squares · float16 · layout=TN, accumulate=float32 · cold, TFLOP/s**

| Kernel | 512 | 4096 | Speed-up over torch, geometric mean |
| :-- | --: | --: | --: |
| torch | **—** | 10.00 | 1.00× |
| v01_naive | — | 0.1230 | — |
| v02_tiled | — | **10.31** | — |

{REST}

**float16 · layout=TN, accumulate=float32 · m=512, n=512, k=512 · cold**

| Kernel | Time (on PyTorch's clock) | Throughput (TFLOP/s) | % of PyTorch throughput | Speed-up vs. baseline |
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


def cold_only(*args: Any, **values: Any) -> store.Row:
    made = row(*args, **values)
    return {name: value for name, value in made.items() if not name.startswith("steady_")}


def steady_only(*args: Any, **values: Any) -> store.Row:
    made = row(*args, **values)
    return {name: value for name, value in made.items() if not name.startswith("cold_")}


def shown_times(work: Workspace) -> dict[str, list[str]]:
    """The times of the first problem's tables by regime, and as `origin` the sentence about their runs."""
    lines = work.page().splitlines()
    found: dict[str, list[str]] = {"origin": [lines[4]]}
    regime = ""
    for line in lines:
        if line.startswith("**"):
            regime = line.strip("*").rpartition(" · ")[2]
        elif line.startswith("| ") and not line.startswith(("| Kernel", "| :--")):
            found.setdefault(regime, []).append(line.split(" | ")[1].strip("*"))
    return found


def test_a_new_run_of_one_regime_leaves_the_other_regimes_newest_row(work: Workspace) -> None:
    hour = dt.timedelta(hours=1)
    work.write(
        row("torch", 100.0), row("v01", 50.0),
        cold_only("torch", 90.0, run="r2", finished=NOON + hour), cold_only("v01", 40.0, run="r2", finished=NOON + hour),
        row("v02", 30.0), steady_only("v02", 20.0, run="r3", finished=NOON + 2 * hour),
    )  # fmt: skip
    assert work.run() == 0
    shown = shown_times(work)
    assert shown["cold"] == ["90.00 µs", "40.00 µs", "30.00 µs"]
    assert shown["steady"] == ["100.0 µs", "50.00 µs", "20.00 µs"]
    assert "runs r1, r2, r3" in shown["origin"][0]


def test_a_failure_counts_in_both_regimes_and_until_a_newer_time(work: Workspace) -> None:
    hour = dt.timedelta(hours=1)
    failed = {"us": None, "status": "crashed", "message": "signal 11", "finished": NOON + hour}
    work.write(
        row("torch"),
        row("v01", 50.0), row("v01", **failed),
        row("v02", 50.0), row("v02", **failed), cold_only("v02", 40.0, finished=NOON + 2 * hour),
        row("v03", **failed | {"finished": NOON}), row("v03", 30.0, finished=NOON + hour),
    )  # fmt: skip
    assert work.run() == 0
    shown = shown_times(work)
    assert shown["cold"] == ["100.0 µs", "crashed", "40.00 µs", "30.00 µs"]
    assert shown["steady"] == ["100.0 µs", "crashed", "—", "30.00 µs"]


def test_figures_against_another_baseline_or_in_another_unit_are_not_joined(work: Workspace) -> None:
    later = NOON + dt.timedelta(hours=1)
    work.write(
        row("torch"),
        row("v01", 50.0, baseline="v02"), cold_only("v01", 40.0, finished=later),
        row("v03", 50.0, metric="GB/s"), cold_only("v03", 30.0, finished=later, metric="TFLOP/s"),
    )  # fmt: skip
    assert work.run() == 0
    shown = shown_times(work)
    assert shown["cold"] == ["100.0 µs", "40.00 µs", "30.00 µs"]
    assert shown["steady"] == ["100.0 µs", "—", "—"]


def test_an_unconverged_cold_time_stays_marked_beside_a_newer_steady_one(work: Workspace) -> None:
    later = NOON + dt.timedelta(hours=1)
    work.write(row("torch"), row("v01", 50.0, status="unconverged"), steady_only("v01", 20.0, finished=later))
    assert work.run() == 0
    assert "| **v01 †** " in work.page() and "20.00 µs" in work.page()


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
    assert ops_shown(readme.partition("<!-- results:begin -->")[2]) == [H200, "hgemm", "rope"]
    assert "NVIDIA H200, hgemm (float16" in readme
    said = "[NVIDIA H200](docs/results/nvidia-h200/README.md), [NVIDIA A100](docs/results/nvidia-a100/README.md), "
    assert f"{said}[AMD EPYC 9654](docs/results/amd-epyc-9654/README.md), [unknown device]" in readme
    other = work.pages / "amd-epyc-9654" / "README.md"
    assert ops_shown(other.read_text()) == [EPYC, "rope"]
    assert "[1 problem](../amd-epyc-9654/rope.md)" in other.read_text()
    assert figures.check_pages([work.readme, *work.pages.glob("*/*.md")])[0] == []


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
    monkeypatch.setattr(tables, "MOST_PROBLEMS", 4)
    problems = [f"float16/{TN}/m={m}" for m in range(10)]
    work.write(*(row(problem=p, flops=i, device=d) for i, p in enumerate(problems, 1) for d in (H200, EPYC)))
    assert work.run() == 0
    assert work.device_page().read_text().count("| [10 problems](../") == 1
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


def test_the_counts_of_all_problems_add_up_and_say_what_ours_are_compared_with(work: Workspace) -> None:
    problem = "float16/{}/m={},n=8,k=8".format
    eager: dict[str, Any] = {"baseline": "torch_eager", "backend": "cuda", "cold_verdict": "faster"}
    wrong = "gives another result when run again, which looks like a race (normal inputs, m=4)"
    work.write(
        row("torch", None, problem(TN, 4), status="wrong", message=wrong, flops=1e12),
        row("v01", 50.0, problem(TN, 4), backend="cuda", cold_verdict="tie", flops=1e12),
        row("v01", 50.0, problem(TN, 1), **eager),  # torch was not timed there
        row("torch", 50.0, problem(TN, 2), backend="torch"),
        row("v01", None, problem(TN, 2), status="unsupported", message="m is 2", backend="cuda"),
    )
    assert work.run() == 0
    assert "| 200.0 % of torch (a tie) ‡ | [1 faster, 1 tie, 1 not compared](" in work.readme.read_text()
    text = work.device_page().read_text()
    assert "| 200.0 % tie ‡ | 200.0 % ‡ | — | 1 faster, 1 tie, 1 not compared | [3 problems](" in text
    race = "gives another result when run again, which looks like a race"
    assert f"‡ hgemm: ours were timed beside torch, but its own row there is wrong: {race}." in text
    assert "ours are compared with another baseline than torch: hgemm 1 (torch_eager)." in text


@pytest.mark.parametrize(
    ("baselines", "header"),
    [
        (("torch", "torch"), "Time (on PyTorch's clock)"),
        (("torch_eager", "torch_eager"), "Time (on torch_eager's clock)"),
        (("torch", "torch_eager"), "Time (on each baseline's clock)"),
        ((None, None), "Time"),
    ],
)
def test_the_time_column_says_whose_clock_it_is(work: Workspace, baselines: tuple[str, ...], header: str) -> None:
    work.write(*(row(f"v0{i}", 50.0, baseline=baseline) for i, baseline in enumerate(baselines)))
    assert work.run() == 0
    assert work.tables()[0][0][1] == header
