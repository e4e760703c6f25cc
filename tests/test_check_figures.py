"""Tables that contradict themselves are found, and those that the code makes do not."""

from __future__ import annotations

import pytest

from analysis import check_figures
from tests.tables import MARKERS, Workspace, row


@pytest.fixture
def text(work: Workspace) -> str:
    """A page with both regimes of four kernels, of which two are a tie."""
    cuda = {"backend": "cuda", "steady_speedup": 0.98}
    work.write(row(), row("v01_naive", 431.7, **cuda), row("v02", 71.33, **cuda), row("v03", 71.5, **cuda))
    assert work.run() == 0
    return work.page()


def test_what_is_made_of_rows_agrees(text: str, work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(check_figures.contradictions(text)) == []
    assert check_figures.main([str(work.readme), str(work.op_pages()[0])]) == 0
    assert capsys.readouterr().out == "8 rows of tables agree\n"


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
    assert any(said in found for found in check_figures.contradictions(text.replace(shown, instead, 1)))


def test_a_page_without_tables_is_no_proof(work: Workspace) -> None:
    assert check_figures.main([str(work.readme)]) == 1


@pytest.mark.parametrize(
    ("shown", "instead", "said"),
    [
        ("| 140.2 % |", "| 141.2 % |", "the table of ops says v02 has 141.2 % cold"),
        ("| 98.0 % |", "| 97.0 % |", "the table of ops says v02 has 97.0 % steady"),
        ("reaches 140.2 %", "reaches 141.2 %", "the headline says 141.2 % cold and 98.0 % steady, and no line"),
        ("m=n=k=512 |", "m=n=k=1024 |", "v02 has 140.2 % cold"),
        ("hgemm.md)", "absent.md)", "absent.md has None"),
    ],
)
def test_the_readme_repeats_the_figures_of_its_pages(
    text: str, work: Workspace, shown: str, instead: str, said: str
) -> None:
    work.readme.write_text(f"<!-- headline:begin -->\n<!-- headline:end -->\n{MARKERS}")
    assert text and work.run() == 0
    assert list(check_figures.of_pages(work.readme)) == []
    readme = work.readme.read_text()
    assert shown in readme
    work.readme.write_text(readme.replace(shown, instead, 1))
    assert any(said in found for found in check_figures.of_pages(work.readme))


def test_a_square_is_written_in_full() -> None:
    assert check_figures.in_full("bfloat16 · m=n=8") == "bfloat16 · m=8, n=8"
    assert check_figures.in_full("bfloat16 · m=1, n=8") == "bfloat16 · m=1, n=8"
