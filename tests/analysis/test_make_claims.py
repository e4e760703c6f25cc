"""Claims beside rows: what is shown is of the named row, and whether a claim holds is computed from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minfer.analysis import make
from minfer.analysis.claims import CLAIMS, Claim, Counter, Over, Peaks, Schedulers, Share, gemm
from minfer.analysis.makers import claims as make_claims
from minfer.rows import store
from tests.tables import TN, row

PEAKS = {"mma_a_b": 600.0, "mma_a_b_mhz": 2000.0, "wgmma_a_b": 800.0, "wgmma_a_b_mhz": 1600.0, "copy_gbps": 1.0}


def made(kernel: str, us: float | None, **values: Any) -> store.Row:
    return row(kernel, us, f"bfloat16/{TN}/m=8,n=8,k=8", peaks=PEAKS, **values)


# 32 of 64 warps are resident. A scheduler issues every 4th cycle, and each warp issues every 32nd: so a scheduler has 8 warps.
WARPS = {"occupancy_percent": 50.0, "blocks_by_warps": 2.0, "block_threads": 1024.0, "issue_percent": 25.0}
WARPS |= {"stall_selected": 1.0, "stall_wait": 31.0}


@pytest.fixture
def rows(tmp_path: Path) -> make_claims.Found:
    counted = {
        "metrics": {"conflicts": 30.0, "loads": 60.0} | {f"ncu.{name}": each for name, each in WARPS.items()},
        "cold_percent_of_peak": 50.0,
    }
    measured = [
        made("torch", 100.0, **counted),
        made("v01", 200.0),
        made("v02", 400.0),
        made("v03", None, status="wrong"),
    ]
    return make_claims.index_rows(store.to_table(measured))


@pytest.mark.parametrize(
    ("kernel", "show", "shown"),
    [
        ("torch", Share(), (50.0, None)),
        ("v01", Over("torch"), (50.0, 50.0)),
        ("v02", Over("v01"), (50.0, 50.0)),
        ("torch", Counter("conflicts", "loads"), (0.5, None)),
        ("torch", Counter("loads"), (60.0, None)),
        ("torch", Peaks("mma_a_b", "wgmma_a_b"), (75.0, None)),
        ("torch", Peaks("mma_a_b", "wgmma_a_b", per_clock=True), (60.0, None)),
        ("torch", Schedulers(), (4.0, None)),
    ],
)
def test_a_query_shows_its_row(rows: make_claims.Found, kernel: str, show: Any, shown: tuple[float, float]) -> None:
    (figure,) = make_claims.find_figures(Claim("", "", (gemm(kernel, 8, show),)), rows)
    assert figure.row["kernel"] == kernel and figure.shown == pytest.approx(shown)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"least": 50}, "It holds."),
        ({"most": 49}, "It does not hold."),
        ({"least": 40, "most": 49}, "It does not hold."),
        ({}, "It holds."),
    ],
)
def test_whether_a_claim_holds_follows_from_its_figures(
    rows: make_claims.Found, limits: dict[str, float], said: str
) -> None:
    lines = make_claims.claim_lines(Claim("x", "y", (gemm("v01", 8, Over("torch")),), **limits), rows)
    assert f"Read as: y. **{said}**" in lines
    both = Claim("x", "y", (gemm("v01", 8, Over("torch")), gemm("v02", 8, Over("torch"))), least=30)
    assert "**It holds for 2 of 4 figures.**" in "\n".join(make_claims.claim_lines(both, rows))


def test_each_device_has_a_verdict_of_its_own() -> None:
    here = [made("torch", 100.0), made("v01", 200.0)]
    there = [made("torch", 100.0, device="NVIDIA H100"), made("v01", 400.0, device="NVIDIA H100")]
    more = [row("torch", 100.0)]  # the device with most rows comes first
    found = make_claims.index_rows(store.to_table([*there, *here, *more]))
    lines = make_claims.claim_lines(Claim("x", "y", (gemm("v01", 8, Over("torch")),), least=50), found)
    assert "Read as: y. **NVIDIA H200: it holds.** **NVIDIA H100: it does not hold.**" in lines
    assert [line.split(" | ")[1] for line in lines if "v01" in line] == ["NVIDIA H200", "NVIDIA H100"]


@pytest.mark.parametrize("kernel", ["v03", "v04"])
def test_what_nobody_measured_says_so(rows: make_claims.Found, kernel: str) -> None:
    lines = make_claims.claim_lines(Claim("x", "y", (gemm(kernel, 8, Over("torch")),)), rows)
    assert "Read as: y. No row measured it yet." in lines and not any(line.startswith("|") for line in lines)


def test_the_page_is_written_checked_and_has_every_claim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.write(store.to_table([made("torch", 100.0)]), tmp_path / "a.parquet")
    page = tmp_path / "claims.md"
    where = ["--results", str(tmp_path), "--docs", str(tmp_path)]
    assert (
        make.main(["claims", *where, "--check"]) == 1 and "out of date" in capsys.readouterr().err and not page.exists()
    )
    assert make.main(["claims", *where]) == 0 and make.main(["claims", *where, "--check"]) == 0
    assert all(f"## {claim.said}" in page.read_text() for claim in CLAIMS)
