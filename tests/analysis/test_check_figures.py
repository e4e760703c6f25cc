"""Tables that contradict themselves are found, and those that the code makes do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minfer.analysis import make
from minfer.analysis.checks import results
from minfer.analysis.makers.figures import check_pages
from tests.tables import MARKERS, Workspace, row

CLOCKED = {"wgmma": 800.0, "wgmma_mhz": 1500.0}


@pytest.fixture
def text(work: Workspace) -> str:
    """A page with both regimes of four kernels, of which two are a tie."""
    cuda = {"backend": "cuda", "steady_speedup": 0.98}
    work.write(row(), row("v01_naive", 431.7, **cuda), row("v02", 71.33, **cuda), row("v03", 71.5, **cuda))
    assert work.run() == 0
    return work.page()


def test_what_is_made_of_rows_agrees(text: str, work: Workspace) -> None:
    assert list(results.check_tables(text)) == []
    assert check_pages([work.readme, work.op_pages()[0]]) == ([], 8)


@pytest.mark.parametrize(
    ("shown", "instead", "said"),
    [
        ("71.33 µs", "72.33 µs", "v02 is said to have 140.2 % of PyTorch's time, and its figures give 138.3"),
        ("140.2 %**", "141.2 %**", "v02 is said to have 141.2 % of PyTorch's time, and its figures give 140.2"),
        (
            "**6.052×**",
            "**6.252×**",
            "v02 is said to have 6.252 times the speed of v01_naive, and its figures give 6.052",
        ),
        (
            "| 10.00 | 100.0 %",
            "| 11.00 | 100.0 %",
            "v01_naive is said to have 23.2 % of PyTorch's rate, and its figures",
        ),
        ("**v02** | **71", "v02 | **71", "the fastest kernel is not in bold"),
        ("reaches 140.2 %", "reaches 139.2 %", "the sentence says 139.2 % cold, the table 140.2 %"),
    ],
)
def test_a_contradiction_is_found(text: str, shown: str, instead: str, said: str) -> None:
    assert shown in text
    assert any(said in found for found in results.check_tables(text.replace(shown, instead, 1)))


def test_only_the_paired_ratio_of_a_time_that_is_not_on_the_clock_may_differ_from_that_of_the_times(
    work: Workspace,
) -> None:
    """PyTorch took 120 µs beside v02, whose ratio is that to these; in its own row it took 100."""
    waits = {"cold_baseline_us": 120.0, "cold_speedup": 2.4, "cold_baseline_late": 1.0, "cold_late": 0.0}
    work.write(row(), row("v01_naive", 200.0), row("v02", 50.0, **waits))
    assert work.run() == 0
    text = work.page()
    assert "| **v02 §** | **50.00 µs** |" in text and "**240.0 %**" in text and "**4.000×**" in text
    assert list(results.check_tables(text)) == []
    assert any("times the speed" in said for said in results.check_tables(text.replace("**4.000×**", "**4.800×**")))
    assert any("240 % of PyTorch" in said for said in results.check_tables(text.replace("v02 §", "v02")))


def check(work: Workspace, *words: object) -> int:
    """The exit status of the command for the pages of a workspace."""
    return make.main(["figures", *map(str, words), "--results", str(work.results), "--readme", str(work.readme)])


def test_a_page_without_tables_is_no_proof(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(work) == 1 and "have no table to check" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shown", "instead", "said"),
    [
        ("| 140.2 % |", "| 141.2 % |", "the table of ops says v02 has 141.2 % cold"),
        ("| 98.0 % |", "| 97.0 % |", "the table of ops says v02 has 97.0 % steady"),
        ("m=n=k=512 |", "m=n=k=1024 |", "v02 has 140.2 % cold"),
        ("hgemm.md)", "absent.md)", "absent.md has None"),
    ],
)
def test_a_devices_table_of_ops_repeats_the_figures_of_its_pages(
    text: str, work: Workspace, shown: str, instead: str, said: str
) -> None:
    assert text and work.run() == 0
    page = work.device_page()
    assert list(results.check_ops_table(page)) == []
    written = page.read_text()
    assert shown in written
    page.write_text(written.replace(shown, instead, 1))
    assert any(said in found for found in results.check_ops_table(page))


@pytest.mark.parametrize(
    ("shown", "instead", "said"),
    [
        ("reaches 140.2 %", "reaches 141.2 %", "the headline says 141.2 % cold, and"),
        ("98.0 % steady", "97.0 % steady", "the headline says 97.0 % steady, and"),
        ("| **140.2 %** |", "| **141.2 %** |", "the README's ladder says"),
        ("| v01_naive | 5.000 |", "| v01_naive | 6.000 |", "the README's ladder says"),
        ("140.2 % of torch", "141.2 % of torch", "the README says 141.2 % of torch"),
        ("140.2 % of torch", "140.2 % of liger", "in the column % of liger"),
        ("[1 faster]", "[2 faster]", "the README says [2 faster]"),
        ("hgemm.md)", "absent.md)", "absent.md None"),
    ],
)
def test_the_readme_repeats_the_figures_of_its_pages(work: Workspace, shown: str, instead: str, said: str) -> None:
    work.readme.write_text(f"<!-- headline:begin -->\n<!-- headline:end -->\n{MARKERS}")
    best = row("v02", 71.33, backend="cuda", steady_speedup=0.98, cold_verdict="faster")
    work.write(row(), row("v01_naive", 200.0, backend="cuda"), best)
    assert work.run() == 0
    assert list(results.check_readme(work.readme)) == []
    readme = work.readme.read_text()
    assert shown in readme
    work.readme.write_text(readme.replace(shown, instead, 1))
    assert any(said in found for found in results.check_readme(work.readme))


def test_a_square_is_written_in_full() -> None:
    assert results.write_out("bfloat16 · m=n=8") == "bfloat16 · m=8, n=8"
    assert results.write_out("bfloat16 · m=1, n=8") == "bfloat16 · m=1, n=8"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, None),
        ({"floor_us": 101.0}, "the cold time of 100 µs is below its floor of 101 µs"),
        ({"bytes": 5e8, "cold_gbps": 5000.0}, "5000 GB/s is more than the measured peak of 4300 GB/s allows"),
        ({"cold_gbps": 4400.0}, None),  # a probe finds a little less than the device can do
        (
            {"cold_tflops": 900.0, "peaks": CLOCKED | {"max_sm_mhz": 1500.0}},
            "900 TFLOP/s is more than the measured peak of 800 TFLOP/s allows",
        ),
        ({"cold_tflops": 900.0, "peaks": CLOCKED | {"max_sm_mhz": 1980.0}}, None),  # the probe's clock was lower
    ],
)
def test_a_figure_beyond_what_its_row_measured_of_the_device_is_found(
    work: Workspace, text: str, capsys: pytest.CaptureFixture[str], values: dict[str, Any], said: str | None
) -> None:
    peaks = {"copy_gbps": 4000.0, "read_gbps": 4300.0, "wgmma": 800.0}
    file = work.write(row(**{"peaks": peaks, "roof": "wgmma", "floor_us": 90.0} | values), name="b")
    assert text and check(work, file) == int(said is not None)
    shown = capsys.readouterr()
    assert said in shown.err if said else shown.out.endswith("; 1 measured rows are within their roofs\n")


@pytest.mark.parametrize(
    ("sentence", "missing"),
    [
        ("v02 takes 71.3 µs, PyTorch 0.1 ms.", None),
        ("v02 takes 71.5 µs.", "71.5 µs"),  # that is another kernel's
        ("The fastest takes 71 µs, and the next 73 µs.", "73 µs"),
        ("In a tuning run v02 took 73 µs.", None),
    ],
)
def test_a_time_in_prose_is_one_of_the_tables(
    work: Workspace, text: str, tmp_path: Path, sentence: str, missing: str | None
) -> None:
    page = tmp_path / "docs" / "hgemm.md"
    link = work.op_pages()[0].relative_to(page.parent)
    page.write_text(
        f"# hgemm\n\nAbout 9 µs.\n\n## Measured on an H200\n\n{sentence}\n\nAll: [tables]({link.as_posix()}).\n"
    )
    found = list(results.check_prose(page))
    assert text and len(found) == (missing is not None)
    assert missing is None or f"no table has the {missing}" in found[0]
