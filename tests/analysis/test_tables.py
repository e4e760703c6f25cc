"""A table of one problem: what its cells say, and what no text of a row can do to it."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from minfer.analysis.data.prepare import on_one_clock
from minfer.analysis.tables.problem import LEGEND, MORE_LEGEND, OTHER_LEGEND, duration, memory
from minfer.analysis.tables.sections import README_LEGEND
from minfer.rows import store
from tests.tables import NOON, TN, Workspace, other, row


def test_best_is_the_fastest_measured_kernel_of_each_regime(work: Workspace) -> None:
    work.write(
        row("torch"),
        row("v01", 90.0, steady_speedup=0.9),
        row("v02", 1.0, status="wrong"),
        row("v10", 120.0),
        row("v9", 95.0),
    )
    assert work.run() == 0
    bold = [[cells[0] for cells in table if cells[1].startswith("**")] for table in work.tables()]
    assert bold == [["**v01**"], ["**v9**"]]
    assert all(
        all(c.startswith("**") for c in cells) == cells[0].startswith("**") for t in work.tables() for cells in t
    )


def test_those_that_cannot_be_told_from_the_best_are_bold_too(work: Workspace) -> None:
    """By ratios that were paired, whatever the times of different moments say."""
    wide = {"cold_speedup_low": 0.99, "cold_speedup_high": 1.2}
    best: dict[str, Any] = {"cold_speedup": 1.1, "cold_speedup_low": 1.08, "cold_speedup_high": 1.11}
    rows = [row("v01", 70.0, **best), row("v02", 60.0, **best | {"cold_speedup": 1.092}), row("v03", 95.0, **wide)]
    cells = work.cells(row(), *rows, row("v04", 40.0, **best | {"cold_speedup": 1.07, "cold_speedup_high": 1.075}))
    assert [line[0] for line in cells] == ["torch", "**v01**", "**v02**", "**v03**", "v04"]


def test_kernels_are_in_ladder_order(work: Workspace) -> None:
    names = ["torch", "v1", "v2", "v10", "cpu_naive", "triton_tiled"]
    assert [cells[0].strip("*") for cells in work.cells(*map(row, reversed(names)))] == names


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
    assert duration(us) == text


def test_percent_is_the_paired_ratio_not_that_of_medians(work: Workspace) -> None:
    cells = work.cells(row(us=100.0), row("v01", 50.0, cold_speedup=0.5314))
    assert cells[1] == ["v01", "188.2 µs", "5.314", "53.1 %", "baseline"]


def test_another_baseline_than_torch(work: Workspace) -> None:
    rows = [
        row("torch", 100.0, cold_speedup=4.0),
        row("v01", 400.0, cold_speedup=1.0),
        row("v02", 200.0, cold_speedup=2.0),
    ]
    cells = work.cells(*(made | {"baseline": "v01", "cold_baseline_us": 400.0} for made in rows))
    assert [line[3].strip("*") for line in cells] == ["100.0 %", "25.0 %", "50.0 %"]
    assert [line[4].strip("*") for line in cells] == ["4.000×", "baseline", "2.000×"]


def test_two_baselines_in_one_table(work: Workspace) -> None:
    cells = work.cells(row("torch"), row("v01", 80.0), row("v02", 50.0, baseline="v01", cold_speedup=1.6))
    assert [line[4].strip("*") for line in cells] == ["0.800×", "baseline", "1.280×"]
    assert cells[2][1] == "**62.50 µs**" and cells[2][3] == "**160.0 %**"  # 1.6 of v01, whose rows say 100 µs


def test_tie_is_said_and_other_verdicts_are_not(work: Workspace) -> None:
    interval: dict[str, Any] = {"cold_speedup_low": 0.5288, "cold_speedup_high": 0.5341}
    rows = [row(name, 188.3, cold_verdict=name, **interval) for name in ("slower", "tie")]
    assert [line[3] for line in work.cells(row(), *rows)][1:] == ["53.1 % (52.9–53.4)", "53.1 % (52.9–53.4) tie"]


def test_of_a_ratio_with_a_very_wide_interval_only_the_verdict_is_shown(work: Workspace) -> None:
    """The report showed 750.7 % (505.9–174002.7) where a terminal showed no percentage."""
    wide: dict[str, Any] = {"cold_speedup_low": 5.06, "cold_speedup_high": 1740.0, "cold_verdict": "faster"}
    assert [line[3].strip("*") for line in work.cells(row(), row("v01", 13.3, **wide))] == ["100.0 %", "faster"]


@pytest.mark.parametrize("first", ["v01_naive", "cpu_naive", "v04"])
def test_speed_up_is_over_the_first_rung_that_was_timed(work: Workspace, first: str) -> None:
    unsupported = row("v00", None, status="wrong", message="no")
    cells = work.cells(row(), unsupported, row(first, 400.0), row("z_other", 50.0))
    assert work.tables()[0][0][4] == f"Speed-up vs. {first}"
    assert [line[4].strip("*") for line in cells if "v00" not in line] == ["4.000×", "baseline", "8.000×"]


def test_the_headline_says_both_regimes_of_the_fastest_of_ours(work: Workspace) -> None:
    steady: dict[str, Any] = {"steady_speedup": 0.997, "steady_verdict": "tie"}
    work.write(row(), row("compiled", 50.0, backend="torch"), row("v01", 80.0, **steady, backend="cuda"))
    assert work.run() == 0
    said = "of PyTorch's throughput **v01** reaches 125.0 % cold and 99.7 %, a tie, steady."
    assert f"\nfloat16 · layout=TN, accumulate=float32 · m=512, n=512, k=512: {said}\n" in work.text()


def test_a_share_whose_interval_is_too_wide_is_in_no_sentence(work: Workspace) -> None:
    wide: dict[str, Any] = {"cold_speedup_low": 0.9, "cold_speedup_high": 2.8, "cold_verdict": "faster"}
    steady: dict[str, Any] = {"steady_speedup": 1.5, "steady_verdict": "faster"}
    work.write(row(), row("v01", 80.0, **wide, **steady, backend="cuda"))
    assert work.run() == 0
    assert "m=512, n=512, k=512: of PyTorch's throughput **v01** reaches 150.0 % steady.\n" in work.text()
    assert "| faster than torch |" in work.readme.read_text()


def test_without_pytorch_there_is_no_percentage(work: Workspace) -> None:
    cells = work.cells(row("torch", None, status="oom"), row("v01", 5.0, baseline=None, cold_speedup=None))
    assert cells[1] == ["**v01**", "**5.000 µs**", "**200.0**", "**—**", "**baseline**"]


def test_regime_that_nobody_has_is_skipped(work: Workspace) -> None:
    work.write(row("torch", None, steady_us=5.0), row("v01", None, status="ok"))
    assert work.run() == 0
    assert "· cold**" not in work.text()
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
    skipped = next(line for line in work.text().splitlines() if line.startswith("Not run"))
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
    text = work.text()
    assert work.tables()[0][1:] == [["torch", "timeout", "—", "—", "late"]]
    assert (
        "k=512 · not timed**" in text
        and "Not run: 1 problem that no kernel here supports." in text
        and "m=1" not in text
    )


def test_only_unconverged_rows_have_a_dagger_and_a_footnote(work: Workspace) -> None:
    assert [cells[0] for cells in work.cells(row(), row("v01", 200.0, status="unconverged"))] == ["**torch**", "v01 †"]
    assert work.text().count("\n† unconverged") == 1
    work.write(row(), row("v01", 200.0))
    assert work.run() == 0
    assert "†" not in work.text()


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
    assert cells[1:] == [["**v01**", "**5.000 µs**", "**—**", "**2000 %**", "**baseline**"], ["v02", *"————"]]


HOSTILE = st.text(
    st.one_of(st.sampled_from("|\\`*_~<>[]()!&#$-:\r\n\t †\x00\u2028"), st.characters(exclude_categories=["Cs"])),
    max_size=30,
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


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kernel=HOSTILE, message=HOSTILE)
@example(kernel=MARKDOWN, message=MARKDOWN)
def test_no_text_of_a_row_can_break_the_table(work: Workspace, kernel: str, message: str) -> None:
    kernel = kernel if kernel != "torch" else "other"
    best = row("zz", 50.0) | {"kernel": f"z{kernel}"}
    work.write(row(), best, row(None, None, status="error", message=message) | {"kernel": kernel})  # type: ignore[arg-type]
    assert work.run() == 0
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(work.text())
    assert [token.type for token in tokens].count("table_open") == 2
    cells = [inline_text(tokens[i + 1]) for i, token in enumerate(tokens) if token.type in ("td_open", "th_open")]
    assert len(cells) == 2 * 5 * 4  # two tables of a header and three rows
    body = [cells[i : i + 5] for i in range(5, 20, 5)]
    first = re.match("v[0-9]|.*_naive$", f"z{kernel}")
    assert ["torch", "100.0 µs", "10.00", "100.0 %", "0.500×" if first else "—"] in body
    assert [shown(f"z{kernel}"), "50.00 µs", "20.00", "200.0 %", "baseline" if first else "—"] in body
    assert [shown(kernel), "error", "—", "—", shown(message)] in body


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=HOSTILE)
def test_no_other_text_can_either(work: Workspace, text: str) -> None:
    names = dict.fromkeys(("device", "run", "commit", "torch", "driver", "baseline", "device_kind", "message"), text)
    work.write(row("v01", 5.0, f"{text}/{text}/{text}", op="o" + text, **names), row("v02", None, status=text, **names))
    assert work.run() == 0
    for text, links in ((work.text(), 0), (work.readme.read_text(), 2)):
        for legend in (LEGEND, OTHER_LEGEND, MORE_LEGEND, README_LEGEND):
            text = text.replace(legend, "")
        tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
        kinds = {token.type for token in tokens}
        assert kinds <= {
            f"{tag}_{end}"
            for tag in ("table", "thead", "tbody", "tr", "th", "td", "heading", "paragraph")
            for end in ("open", "close")
        } | {"inline", "html_block"}
        assert (
            sum(token.type == "html_block" for token in tokens) == 2
        )  # of two pages their first lines, and the markers
        for token in tokens:
            if links and re.match(r"\[none compared\]\(", token.content):
                links -= 1
            elif token.content.startswith("Steady calls too"):
                continue
            else:
                assert token.type != "inline" or inline_text(token)
        assert not links


@pytest.mark.parametrize("regime", ["cold", "steady"])
def test_times_are_on_the_clock_of_the_common_baseline(work: Workspace, regime: str) -> None:
    """Beside v02 the card was a fifth slower than beside v01. So v02 took longer and is the faster, by their ratios."""
    figures = {
        "torch": (10.0, 10.0, None),
        "v01": (10.0, 10.0, 1.0),
        "v02": (10.9, 12.0, 1.1),
        "v03": (7.0, None, None),
    }
    work.write(
        *(
            row(kernel, us, **{f"{regime}_baseline_us": beside, f"{regime}_speedup": speedup})
            for kernel, (us, beside, speedup) in figures.items()
        )
    )
    assert work.run() == 0
    table = work.tables()[["cold", "steady"].index(regime)]
    times = {cells[0].strip("*"): cells[1].strip("*") for cells in table[1:]}
    assert times == {"torch": "10.00 µs", "v01": "10.00 µs", "v02": "9.091 µs", "v03": "7.000 µs"}


def test_a_time_stays_as_it_is_where_no_clock_explains_the_baseline(work: Workspace) -> None:
    """The baseline took four times as long beside the library, which made the host wait."""
    figures = {"v01": (10.0, 100.0, 10.0), "v02": (20.0, 100.0, 5.0), "library": (800.0, 400.0, 0.5)}
    work.write(
        *(
            row(kernel, us, baseline="eager", cold_baseline_us=beside, cold_speedup=speedup)
            for kernel, (us, beside, speedup) in figures.items()
        )
    )
    assert work.run() == 0
    times = {cells[0].strip("*"): cells[1].strip("*") for cells in work.tables()[0][1:]}
    assert times == {"v01": "10.00 µs", "v02": "20.00 µs", "library": "800.0 µs"}


@pytest.mark.parametrize(
    ("waited", "marked"),
    [
        ({"flags": f"another; {store.HOST_BOUND}"}, True),
        ({"cold_late": 0.0, "cold_baseline_late": 0.5}, True),
        ({"cold_late": 0.5, "cold_baseline_late": 0.0}, True),
        ({"cold_late": 0.0, "cold_baseline_late": 0.02, "flags": store.HOST_BOUND}, False),  # once, by a busy host
        ({"flags": ""}, False),
    ],
)
def test_a_cold_time_is_not_scaled_by_a_baseline_that_waited_for_the_host(
    work: Workspace, waited: dict[str, Any], marked: bool
) -> None:
    """A baseline of 120 µs may be due to the clock. Its row neither changes nor changes the others if it waited."""
    both = {"cold_baseline_us": 100.0, "cold_speedup": 10.0, "steady_baseline_us": 100.0, "steady_speedup": 10.0}
    waits = both | {"cold_baseline_us": 120.0, "steady_baseline_us": 120.0}
    work.write(row("v01", 10.0, baseline="eager", **both), row("v02", 12.0, baseline="eager", **waits, **waited))
    assert work.run() == 0
    cold, steady = ({cells[0].strip("*"): cells[1].strip("*") for cells in table[1:]} for table in work.tables())
    scaled = {"v01": "11.00 µs", "v02": "11.00 µs"}
    assert cold == ({"v01": "10.00 µs", "v02 §": "12.00 µs"} if marked else scaled)
    assert steady == scaled and ("§ The GPU waited for the host" in work.text()) == marked


def test_the_throughput_is_in_the_ops_metric(work: Workspace) -> None:
    norm = "bfloat16/norm=rms,residual=add/tokens=64,hidden=4096"
    decode = "bfloat16//batch=8"
    work.write(
        *(other("norm", "GB/s", kernel, us, norm) for kernel, us in {"torch": 100.0, "v01": 50.0}.items()),
        other("decode", "tokens/s", "torch", 8.0, decode),
        other("select", "rows | s", "torch", 8.0, decode),
    )
    assert work.run() == 0
    assert [table[0][2] for table in work.tables()[::2]] == [
        f"Throughput ({unit})" for unit in ("tokens/s", "GB/s", "rows &#124; s")
    ]
    assert work.tables()[2][1:] == [
        ["torch", "100.0 µs", "10000", "100.0 %", "0.500×"],
        ["**v01**", "**50.00 µs**", "**20000**", "**200.0 %**", "**baseline**"],
    ]
    assert "bfloat16 · norm=rms, residual=add · tokens=64, hidden=4096 · cold" in work.text()
    assert "TFLOP/s" not in work.text()


def test_old_rows_are_in_tflops_and_a_row_of_another_metric_says_its_own(work: Workspace) -> None:
    new = {"metric": "TFLOP/s", "cold_rate": 40.0, "cold_tflops": 40.0, "cold_speedup": None}
    later = NOON + dt.timedelta(days=1)
    assert [c[2].strip("*") for c in work.cells(row(), row("v01", 25.0, **new))] == ["10.00", "40.00"]
    cells = work.cells(row(), row("v01", 25.0, **new | {"metric": "GB/s", "cold_rate": 7.0, "finished": later}))
    assert [c[2].strip("*") for c in cells] == ["10.00 TFLOP/s", "7.000"]
    assert work.tables()[0][0][2] == "Throughput (GB/s)"


def test_a_rate_that_a_new_row_lacks_is_not_made_up(work: Workspace) -> None:
    assert work.cells(row(metric="GB/s", cold_tflops=10.0))[0][2] == "**—**"


def spent(kernel: str, joules: float, **values: Any) -> store.Row:
    return row(kernel, 100.0, workspace_bytes=0, steady_joules=joules, **values)


def test_workspace_and_energy_are_on_the_page(work: Workspace) -> None:
    gain: dict[str, Any] = {"energy_gain": 2.0, "energy_gain_low": 1.9, "energy_gain_high": 2.1}
    work.write(
        spent("torch", 0.02),
        spent("v01", 0.01, **gain, energy_verdict="tie") | {"workspace_bytes": 3 << 19},
        row("v02", 300.0),
        row("v03", None, status="wrong", message="no"),
    )
    assert work.run() == 0
    cold, steady = (page.splitlines()[2:] for page in work.page().split(" · cold**")[1].split(" · steady**"))
    ends = [[cell.strip(" *") for cell in line.split("|")[6:-1]] for line in cold if line.startswith("|")]
    assert ends == [["Workspace"], ["--:"], ["0 B"], ["1.50 MiB"], ["—"], ["—"]]
    ends = [[cell.strip(" *") for cell in line.split("|")[6:-1]] for line in steady if line.startswith("|")]
    assert ends[0] == ["Workspace", "Energy efficiency (GFLOP/J)"]
    assert ends[2:] == [["0 B", "50.00"], ["1.50 MiB", "100.0; 2.000× (1.900–2.100) tie"], ["—", "—"], ["—", "—"]]
    work.write(row())
    assert work.run() == 0
    assert "Workspace" not in work.page()


@pytest.mark.parametrize(
    ("metric", "header", "cell"),
    [("GB/s", "GB/J", "50.00"), ("tokens/s", "tokens/J", "50.00"), ("share of it", "calls/J", "50.00")],
)
def test_a_joule_buys_what_the_metric_counts(work: Workspace, metric: str, header: str, cell: str) -> None:
    work.write(other("norm", metric, "torch", 100.0, "bfloat16//tokens=1", steady_joules=0.02))
    assert work.run() == 0
    table = [line for line in work.page(op="norm").splitlines() if line.startswith("|")][3:]
    assert f"Energy efficiency ({header})" in table[0] and f"**{cell}** |" in table[2]


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (1 << 34, "16.0 GiB")])
def test_memory_has_a_sensible_unit(nbytes: int, text: str) -> None:
    assert memory(nbytes) == text


def test_two_ops_whose_problems_have_one_name_have_a_clock_each() -> None:
    columns = {
        "device": ["a"] * 2, "op": ["x", "y"], "problem": ["float32//n=1"] * 2, "kernel": ["v01"] * 2,
        "baseline": ["torch"] * 2,
        "cold_us": [10.0, 40.0], "cold_baseline_us": [20.0, 40.0], "cold_speedup": [2.0, 1.0],
    }  # fmt: skip
    assert on_one_clock(pa.table(columns))["cold_us"].to_pylist() == [10.0, 40.0]


def test_a_problems_clock_is_the_median_of_what_the_baseline_took() -> None:
    """Of three kernels of one problem, and of two of another. A row without a speed-up keeps its time, and so does one
    whose baseline took a time that no clock explains, too long or too short."""
    rows = 8
    columns = {
        "device": ["a"] * rows, "op": ["x"] * rows, "problem": ["1", "2", "1", "2", "1", "1", "1", "1"],
        "baseline": ["torch"] * rows,
        "kernel": [f"v0{i}" for i in range(rows)], "cold_us": [1.0] * rows,
        "cold_baseline_us": [30.0, 18.0, 28.0, 22.0, 33.0, 500.0, 90.0, 10.0],
        "cold_speedup": [1.0, 1.0, 2.0, 2.0, 3.0, None, 5.0, 5.0],
    }  # fmt: skip
    assert on_one_clock(pa.table(columns))["cold_us"].to_pylist() == [30.0, 20.0, 15.0, 10.0, 10.0, 1.0, 1.0, 1.0]


def test_what_the_window_reads_stands_above_short_kernels_only(work: Workspace) -> None:
    said = "The window in which a call is timed reads 2.880 µs with no kernel in it, and 4.320 µs with an empty kernel in it"
    for us, shown in ((9.9, True), (12.0, False)):
        work.write(row(us=20.0, cold_empty_us=2.8), row("v01_naive", us, cold_empty_us=2.96, cold_launch_us=4.32))
        assert work.run() == 0 and (said in work.page()) == shown
    work.write(row(us=5.0, cold_empty_us=2.88))  # as before there was a column of the launch
    assert work.run() == 0 and "reads 2.880 µs with no kernel in it; times" in work.page()


def test_what_autotuning_took_is_a_column_where_a_kernel_tunes(work: Workspace) -> None:
    work.write(row(), row("v01_naive", 50.0), row("triton_autotuned", 40.0, tune_s=2.34))
    assert work.run() == 0
    assert "| Autotuning (s) |" in work.page()
    tuned = [line for line in work.page().splitlines() if line.startswith(("| **triton_autotuned", "| v01_naive"))]
    assert "**2.3**" in tuned[1] and tuned[0].endswith("| — |")
    work.write(row(), row("v01_naive", 50.0))
    assert work.run() == 0 and "Autotuning" not in work.page()


def test_of_a_judged_kernel_the_judges_time_is_shown(work: Workspace) -> None:
    outside = {"judged_us": 80.0, "judged_tflops": 12.5, "judged_baseline_us": 100.0, "judged_speedup": 1.25}
    judged = row("v02_theirs", 50.0, guarantee="judged, landlock", **outside)
    work.write(row("torch", guarantee="in-process"), judged)
    assert work.run() == 0
    text = work.text()
    assert "80.00 µs" in text and "125.0 %" in text and "50.00 µs" not in text
