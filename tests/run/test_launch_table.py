"""The table at the end of a launch: every ratio with how sure it is, and where to look next."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minfer import ops
from minfer.bench.derived import derive
from minfer.bench.judged import FASTER, LONGER
from minfer.bench.timing import Timing
from minfer.jobs.run import Run
from minfer.plan.cases import Plan
from minfer.plan.config import Config
from minfer.rows import store
from minfer.run.progress import RunProgress
from minfer.run.terminal import MOST_CASES, drop_value, print_plan, print_summary
from tests.conftest import FAST
from tests.tables import row

VALUES: dict[str, Any] = {
    "dtype": "float16",
    "params": {"layout": "TN"},
    "shape": {"m": 512, "n": 512, "k": 512},
    "metric": "TFLOP/s",
}


def summary(folder: Path, rows: list[store.Row], width: int = 200, **request: Any) -> str:
    """What a launch prints at the end of a run with these rows."""
    where = folder / "results" / "nvidia-h200" / "r1"
    where.mkdir(parents=True)
    store.write(store.to_table(rows), where / "0000-000.parquet")
    run = Run(folder / "runs" / "r1")
    run.request = Config(results=str(folder / "results"), **request)
    console = Console(record=True, width=width)
    print_summary(console, RunProgress(run), Plan([], {}, {}))
    return console.export_text()


def kernel(name: str, speedup: float, low: float, high: float, verdict: str, **values: Any) -> store.Row:
    ends = {"cold_speedup": speedup, "cold_speedup_low": low, "cold_speedup_high": high, "cold_verdict": verdict}
    return row(name, 100 / speedup, **VALUES | ends | values)


@pytest.fixture
def shown(tmp_path: Path) -> str:
    rows = [row("torch", 100, **VALUES), kernel("v02_tiled", 1.25, 1.2, 1.3, "faster", status="unconverged")]
    return summary(
        tmp_path, [*rows, kernel("v07_tuned", 1.001, 0.999, 1.003, "tie", flags=f"{store.BUSY}; {store.HOST_BOUND}")]
    )


def test_each_ratio_has_its_interval(shown: str):
    assert "% of PyTorch" in shown and "125.0 ± 5.0" in shown and "100.1 ± 0.2 tie" in shown


def test_what_to_know_before_trusting_a_row_is_said(shown: str):
    assert f"Note: 1 of 3 cases: {store.BUSY}." in shown and f"Note: 1 of 3 cases: {store.HOST_BOUND}." in shown


def test_an_interval_that_is_not_symmetric_is_shown_by_its_ends(tmp_path: Path):
    rows = [row("torch", 100, **VALUES), kernel("good", 1.026, 1.013, 1.078, "faster")]
    text = summary(tmp_path, rows)
    assert "102.6 (101.3–107.8)" in text and "±" not in text


@pytest.mark.parametrize(("percent", "shown"), [(104.24, "104.2*"), (100.04, "100.0"), (93.1, "93.1"), (None, "")])
def test_a_row_above_its_roof_is_marked_and_not_hidden(percent: float | None, shown: str, tmp_path: Path):
    text = summary(tmp_path, [row("torch", 100, **VALUES, cold_percent_of_peak=percent)])
    (line,) = [line for line in text.splitlines() if "512x512x512" in line]
    assert (f" {shown} " in line) and ("*" in line) == ("* above the measured peak" in text) == shown.endswith("*")


def test_a_percentage_above_1000_has_no_decimals(tmp_path: Path):
    rows = [row("torch", 100, **VALUES), kernel("good", 42.801, 35.125, 47.898, "faster")]
    assert "4280 (3512–4790)" in summary(tmp_path, rows)


def test_of_an_interval_that_says_nothing_only_the_verdict_is_shown(tmp_path: Path):
    wild = kernel("wild", 0.327, 0.02, 90.0, "tie")
    text = summary(tmp_path, [row("torch", 100, **VALUES), wild, kernel("good", 1.25, 1.2, 1.3, "faster")])
    (line,) = [line for line in text.splitlines() if " wild " in line and "512x512x512" in line]
    assert " tie " in line and "32.7" not in line and "±" not in line
    assert "1 of the percentages is not shown: the interval's upper end is more than 3 times its lower end" in text


def judged(name: str, us: float, **values: Any) -> store.Row:
    """A row whose hints say 50 µs, twice as fast as the baseline."""
    hints = {"cold_rate": 222.0, "steady_rate": 222.0, "cold_verdict": "faster"}
    hints |= {"cold_speedup_low": 0.1, "cold_speedup_high": 9.0}
    ends = {"judged_speedup": 100 / us, "judged_speedup_low": 99 / us, "judged_speedup_high": 101 / us}
    outside = {"judged_us": us, "judged_rate": 1e3 / us, "judged_baseline_us": 100.0, "judged_verdict": "slower"} | ends
    return row(name, 50, **VALUES | hints | outside | {"guarantee": "judged, landlock"} | values)


def test_of_a_judged_row_the_judges_figures_are_shown(tmp_path: Path):
    text = summary(tmp_path, [row("torch", 70, **VALUES, guarantee="in-process"), judged("theirs", 80, status="ok")])
    (line,) = [line for line in text.splitlines() if "theirs" in line]
    assert "80.0" in line and "125.0 ± 1.2" in line and "50.0" not in line and "200" not in line and "222" not in line
    assert "judged" in text and "70.0" in text and "are not shown" not in text
    assert "its percentage compares with" not in text  # the judge's baseline, and one in the process of the kernel


def test_judged_rows_have_a_table_of_their_own_whose_numbers_are_whole_at_100_columns(tmp_path: Path):
    rows = [row("torch", 70000, **VALUES, guarantee="in-process"), judged("theirs", 80000.5, status="ok")]
    rows += [judged("torch_judged", 70000.5, status="ok")]
    text = summary(tmp_path, rows, width=100)
    assert text.count("r1: hgemm on NVIDIA H200") == 2 and "…" not in text and "theirs" in text
    assert "70,000.0" in text and "80,000.5" in text


def test_a_judged_baseline_is_compared_with_its_time_beside_a_kernel(tmp_path: Path):
    rows = [judged("torch", 150, status="ok"), judged("theirs", 80, status="ok", judged_baseline_us=100.0)]
    assert "its percentage compares with 100.0 µs, torch's time" in summary(tmp_path, rows)


def test_why_a_judge_did_not_accept_a_time_is_said(tmp_path: Path):
    case = ops.get("hgemm").case("torch", "float16", {"m": 64, "n": 64, "k": 64})
    samples = [(1e-5 * (1 + number % 7), 1e-5, 1e-5) for number in range(30)]
    noisy = derive(case, samples, [], [], replace(FAST, precision=1e-6), None)["message"]
    longer, faster = LONGER.format(80, 62.5), FASTER.format(2, 1.5)
    for number, (message, said) in enumerate({longer: 0, faster: 0, f"{noisy}; {longer}": 0, noisy: 1}.items()):
        (folder := tmp_path / str(number)).mkdir()
        text = " ".join(summary(folder, [judged("theirs", 80, status="unconverged", message=message)]).split())
        assert (message in text, "gives each case more rounds" in text) == (not said, bool(said)), message


@pytest.mark.parametrize(
    ("timing", "row_has", "advice"),
    [
        (Timing(), {}, "; timing.cold_cap_s=10 gives each case more rounds"),
        (Timing(name="quick"), {}, "; timing=default or timing.cold_cap_s=10 gives"),
        (Timing(cold_cap_s=10), {}, "; timing.cold_cap_s=30 gives"),
        (Timing(looks=[30, 60]), {"cold_rounds": 60}, "; minfer takes at most 60 rounds, so run it again when"),
        (Timing(), {"cold_rounds": 5, "flags": store.SLOW}, "; a kernel that takes long gets few rounds."),
    ],
)
def test_no_advice_is_given_that_is_followed_already(
    timing: Timing, row_has: dict[str, Any], advice: str, tmp_path: Path
):
    wide = row("v02_tiled", 100, **VALUES | {"status": "unconverged", "cold_rounds": 30} | row_has)
    assert advice in summary(tmp_path, [wide], timing=timing)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "the machine was probably busy"),
        ({"node": "n2"}, "the two ran on different nodes, n2 and n1"),
        ({"flags": f"{store.HOST_BOUND}: 90 % of them."}, "the cold times of one of the two include host time"),
    ],
)
def test_it_is_said_where_a_percentage_does_not_follow_from_the_times(tmp_path: Path, values: dict[str, Any], why: str):
    slow = row("torch", 5861.9, **VALUES, node="n1")
    good = kernel("good", 0.675, 0.65, 0.7, "slower", **{"cold_baseline_us": 182.3, "node": "n1"} | values)
    fine = kernel("fine", 1.25, 1.2, 1.3, "faster", cold_baseline_us=5000.0, node="n1")
    (line,) = [line for line in summary(tmp_path, [slow, good, fine]).splitlines() if "same rounds" in line]
    assert line == (
        "good float16 TN 512x512x512: its percentage compares with 182.3 µs, torch's time in the same rounds, not with the "
        f"5,861.9 µs of torch's own row; {why}."
    )


def test_columns_that_no_row_has_are_left_out_and_no_number_is_cut_at_100_columns(tmp_path: Path):
    good = kernel("v03_a_long_name_of_a_kernel", 1.026, 1.013, 1.078, "tie", steady_us=None, steady_tflops=None)
    alone = row("torch", 100, **VALUES, steady_us=None, steady_tflops=None)
    text = summary(tmp_path, [alone, good], width=100)
    assert "102.6 (101.3–107.8) tie" in text and "steady" not in text and "peak" not in text
    assert "…" not in text and "r1: hgemm on NVIDIA H200, float16, TN" in text
    assert all(len(line) <= 100 for line in text.splitlines() if "512" in line)


@pytest.mark.parametrize(
    ("width", "dropped"),
    [
        (120, "steady TFLOP/s"),
        (80, "steady TFLOP/s, steady µs, % of peak, TFLOP/s, status"),
        (60, "steady TFLOP/s, steady µs, % of peak, TFLOP/s, status, % of PyTorch"),
        (40, "steady TFLOP/s, steady µs, % of peak, TFLOP/s, status, % of PyTorch"),
    ],
)
def test_on_a_narrow_terminal_columns_of_numbers_are_dropped_and_rows_keep_their_names(
    width: int, dropped: str, tmp_path: Path
):
    values = VALUES | {"shape": {"m": 4096, "n": 14336, "k": 4096}, "cold_percent_of_peak": 50.2}
    values |= {"cold_rate": 12.3, "steady_rate": 12.4}
    rows = [row("torch", 12345.6, **values)]
    for name, dtype in (("v03_a_long_name_of_a_kernel", "bfloat16"), ("v02_tiled", "float16")):
        rows.append(kernel(name, 1.026, 1.013, 1.078, "tie", **values | {"dtype": dtype, "status": "unconverged"}))
    text = summary(tmp_path, rows, width=width)
    table, caption = text.split(f"Too wide for {width} columns: ")
    assert "…" not in text and max(map(len, table.splitlines())) <= width and "12,345.6" in table
    assert " ".join(caption.split()).startswith(f"{dropped}. ")
    for label in ("v02_tiled", "float16", "bfloat16", "4096x14336x4096", "v03_a_long_name"):
        assert label in table, label


def test_what_comes_next_is_the_report_of_these_rows(shown: str, tmp_path: Path):
    assert f"minfer report {tmp_path}/results/nvidia-h200/r1" in shown.replace("'", "")
    assert "timing.cold_cap_s=10 gives each case more rounds" in shown


def test_each_model_of_gpu_has_a_table_of_its_own(tmp_path: Path):
    rows = [row("torch", 100, **VALUES, device=f"NVIDIA {model}", case=f"on {model}") for model in ("L40S", "A100")]
    text = summary(tmp_path, rows)
    assert "r1: hgemm on NVIDIA L40S" in text and "r1: hgemm on NVIDIA A100" in text


def test_the_time_left_is_rounded_before_it_is_split_into_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RunProgress, "left_s", lambda self: 539.7)
    assert RunProgress(Run(tmp_path)).line().endswith(", about 0:09:00 left")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("supports format=int4_g64 or int4_g128, not q8_0", "supports format=int4_g64 or int4_g128"),
        ("takes packed rows, not strided ones, and an even k", "takes packed rows, not strided ones, and an even k"),
        ("is registered for float16, not float32; if it supports float32, add it to dtypes= where you register it",)
        * 2,
    ],
)
def test_only_the_refused_value_is_left_out_of_a_reason(message: str, shown: str) -> None:
    assert drop_value(message) == shown


def test_the_same_error_of_many_cases_is_one_line_with_a_count(tmp_path: Path):
    why = "RuntimeError: no kernel image"
    many = [
        row(
            "v02_tiled",
            1.0,
            **VALUES | {"case": f"hgemm/v02_tiled/float16//m={m}", "status": "crashed", "message": why},
        )
        for m in range(1, 41)
    ]
    other = row("v07_tuned", 1.0, **VALUES | {"status": "crashed", "message": why})
    text = " ".join(summary(tmp_path, [*many, other]).split())
    assert text.count(why) == 2
    assert f"hgemm/v02_tiled: 40 cases crashed: {why} (the first is {many[0]['case']})" in text
    assert f"{other['case']}: crashed: {why}" in text


@pytest.mark.parametrize("count", [MOST_CASES, MOST_CASES + 1])
def test_a_long_plan_has_a_line_for_each_kernel(count: int) -> None:
    op = ops.get("hgemm")
    cases = [op.case("cpu_naive", "float16", {"m": m, "n": 8, "k": 8}) for m in range(1, count + 1)]
    console = Console(record=True, width=200)
    print_plan(console, Config(), Plan(cases, {cases[0].key: "needs luck"}, {}), [cases[:9], cases[9:]], "local", "cpu")
    shown = console.export_text()
    assert f"{count} cases of hgemm, 2 shards" in shown and "not run: needs luck" in shown
    print_plan(console, Config(), Plan(cases, {}, {}), [cases], "local", "cpu")
    assert f"{count} cases of hgemm, 1 shard\n" in re.sub(" +\n", "\n", console.export_text())
    assert shown.count("cpu_naive") == (count if count <= MOST_CASES else 2)
    assert count <= MOST_CASES or f"{count - 1} shapes" in shown
