"""Pages that contradict themselves are found: docs/hgemm.md, docs/claims.md, the counts of the README, rates in prose."""

from __future__ import annotations

from pathlib import Path

import pytest

from minfer.analysis import make
from minfer.analysis.checks import results
from minfer.analysis.checks.claims import check_claims
from minfer.analysis.checks.hgemm import check_hgemm
from minfer.analysis.claims import CLAIMS
from tests.tables import Workspace, row

HGEMM = """
**v03_wmma.** The tensor pipe is busy 7 % of the time.

| Rung | What limits it |
| :-- | :-- |
| v02_tiled | The load pipe is full at 84 % SM throughput. |
| v03_wmma | 7 % busy. |

**NVIDIA H200 · bfloat16 · TN · sums in float32, cold**

| Rung | 512 (TFLOP/s) | 8192 (TFLOP/s) | Gain over | Tensor pipe busy | SM throughput |
| :-- | --: | --: | :-- | --: | --: |
| v02_tiled | 5.118 | 6.339 | — | 0.0 % | 83.7 % |
| v03_wmma | 2.764 | 47.79 | v02_tiled: 0.540× at 512, 7.54× at 8192 | 7.2 % | 39.4 % |

**NVIDIA H200 · bfloat16 · TN · sums in float32, cold**

| N × K | M | cuBLAS | v15_gemv | v16_skinny | Fastest of ours over cuBLAS |
| :-- | --: | --: | --: | --: | :-- |
| 4096 × 4096 | 1 | 16.56 µs | 15.06 µs | 16.14 µs | 1.10×, v15_gemv |
| 4096 × 4096 | 16 | 16.67 µs | — | 15.01 µs | 1.11×, v16_skinny |

Geometric mean over 2 shapes: 1.105×; the least is 1.100×.
"""


@pytest.mark.parametrize(
    ("shown", "instead", "said"),
    [
        (
            "7.54× at 8192",
            "7.34× at 8192",
            "v03_wmma is said to gain 7.34× at 8192, and the table has 47.79 over 6.339",
        ),
        ("| 5.118", "| 5.218", "v03_wmma is said to gain 0.540× at 512"),
        ("v02_tiled: 0.540", "v01_naive: 0.540", "v03_wmma is said to gain 0.540× at 512"),
        ("1.10×, v15_gemv", "1.12×, v15_gemv", "M=1: the times of cuBLAS and v15_gemv do not give 1.12×"),
        ("1.11×, v16_skinny", "1.11×, v15_gemv", "M=16: the times of cuBLAS and v15_gemv do not give 1.11×"),
        ("16.67 µs", "16.17 µs", "M=16: the times of cuBLAS and v16_skinny do not give 1.11×"),
        ("1.105×", "1.125×", "the table gives 1.105"),
        ("the least is 1.100×", "the least is 1.110×", "the table gives 1.105 and 1.1 over 2"),
        ("over 2 shapes", "over 3 shapes", "Geometric mean over 3 shapes"),
        ("busy 7 %", "busy 9 %", "v03_wmma: “busy 9 %”, and the table has 7.2 %"),
        ("| 7 % busy", "| 8 % busy", "v03_wmma: “8 % busy”, and the table has 7.2 %"),
        ("84 % SM throughput", "86 % SM throughput", "v02_tiled: “86 % SM throughput”, and the table has 83.7 %"),
    ],
)
def test_a_contradiction_in_the_page_of_hgemm_is_found(shown: str, instead: str, said: str) -> None:
    assert list(check_hgemm(HGEMM)) == []
    assert HGEMM.count(shown) == 1
    found = list(check_hgemm(HGEMM.replace(shown, instead)))
    assert any(said in sentence for sentence in found), found


@pytest.fixture
def claims(work: Workspace) -> Path:
    """A page of claims beside the page of results that it quotes, of three sizes."""
    rows = []
    for side in (2048, 4096, 8192):
        problem = f"bfloat16/layout=TN,accumulate=float32/m={side},n={side},k={side}"
        shares = {"v07_tuned": 125.0, "v09_a_stationary": 1250.0, "v03_wmma": 1600.0}
        rows += [row("torch", 100.0, problem)]
        rows += [row(name, us, problem, backend="cuda", cold_speedup=100 / us) for name, us in shares.items()]
    work.write(*rows)
    assert work.run() == 0
    page = work.pages.parent / "claims.md"
    assert make.main(["claims", "--results", str(work.results), "--docs", str(page.parent)]) == 0
    return page


@pytest.mark.parametrize(
    ("shown", "instead", "said"),
    [
        ("**It holds.**", "**It does not hold.**", "says “It does not hold”, but 6 of 6 figures are within the limits"),
        ("**It holds.**", "**It holds for 5 of 6 figures.**", "“It holds for 5 of 6 figures”, but 6 of 6 figures"),
        (
            "| 6.25 | 6.25 |",
            "| 6.50 | 6.25 |",
            "6.50 % of torch's throughput, cold, and its page of results gives 6.25",
        ),
        ("| 10.0 | 10.0 |", "| 10.0 | 10.4 |", "10.4 % of v07_tuned's throughput, steady, and its page of results"),
        ("**It holds.**", "", "figures of 1 devices, but not one verdict for each"),
    ],
)
def test_a_contradiction_in_the_claims_is_found(
    work: Workspace, claims: Path, shown: str, instead: str, said: str
) -> None:
    shares = {page: results.read_shares(page.read_text()) for page in work.op_pages()}
    text = claims.read_text()
    assert list(check_claims(claims, shares)) == [] and shown in text
    claims.write_text(text.replace(shown, instead, 1))
    assert any(said in found for found in check_claims(claims, shares))


def test_the_claims_of_several_devices_are_each_judged(tmp_path: Path) -> None:
    claim = next(claim for claim in CLAIMS if claim.least == 95)
    lines = [
        f"| `hgemm/torch/bfloat16//m=1` | {device} | r | % | {cell} | — |"
        for device, cell in (("NVIDIA A", "94.0"), ("NVIDIA B", "96.0"))
    ]
    head = "| Row | Device | Run | Figure | Cold | Steady |\n| :-- | :-- | :-- | :-- | --: | --: |\n"
    right = "**NVIDIA A: it does not hold.** **NVIDIA B: it holds.**"
    page = tmp_path / "claims.md"
    for said, wrong in (
        (right, 0),
        (right.replace("does not hold", "holds"), 1),
        (right.replace("it holds", "it does not hold"), 1),
    ):
        page.write_text(f"## {claim.said}\n\nRead as: x. {said}\n\n{head}" + "\n".join(lines) + "\n")
        assert len(list(check_claims(page, {}))) == wrong


def test_counts_of_problems_add_up(work: Workspace) -> None:
    work.write(row(), row("v01", 50.0, backend="cuda", cold_verdict="faster"))
    assert work.run() == 0
    text = work.device_page().read_text()
    assert "| 1 faster |" in text and list(results.check_counts(text)) == []
    (found,) = results.check_counts(text.replace("| 1 faster |", "| 1 faster, 2 tie |"))
    assert found == "hgemm: the counts 1 faster, 2 tie do not add up to the 1 problems of the page"


@pytest.mark.parametrize(
    ("sentence", "missing"),
    [
        ("v02 reaches 14.02 TFLOP/s, 140.2 % of PyTorch's throughput.", None),
        ("v02 reaches 14.12 TFLOP/s.", "14.12 TFLOP/s"),
        ("v02 has 139 % of torch.", "139 % of torch"),
        ("v02 was to reach 15 TFLOP/s, of a peak of 20.5.", None),  # rounder than a table: an aim
        ("This card copies at 4.265 TB/s.", None),  # of no kernel
    ],
)
def test_rates_and_shares_in_prose_are_those_of_the_tables(
    work: Workspace, tmp_path: Path, sentence: str, missing: str | None
) -> None:
    work.write(row(), row("v02", 71.33, backend="cuda"))
    assert work.run() == 0
    page = tmp_path / "docs" / "hgemm.md"
    link = work.op_pages()[0].relative_to(page.parent).as_posix()
    page.write_text(f"# hgemm\n\n## Measured on an H200\n\n{sentence}\n\nAll: [tables]({link}).\n")
    found = list(results.check_prose(page))
    assert [missing] == [missing for said in found if missing and missing in said] if missing else not found
