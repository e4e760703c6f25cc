"""The table at the end of a launch: every ratio with how sure it is, and where to look next."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from minfer.plan.cases import Plan
from minfer.rows import store
from minfer.run.progress import RunProgress
from minfer.run.report import print_summary
from tests.tables import row


@pytest.fixture
def shown(tmp_path: Path) -> str:
    values = {
        "dtype": "float16",
        "params": {"layout": "TN"},
        "shape": {"m": 512, "n": 512, "k": 512},
        "metric": "TFLOP/s",
    }
    ends = {"cold_speedup": 1.25, "cold_speedup_low": 1.2, "cold_speedup_high": 1.3, "cold_verdict": "faster"}
    even = {"cold_speedup": 1.001, "cold_speedup_low": 0.999, "cold_speedup_high": 1.003, "cold_verdict": "tie"}
    rows = [row("torch", 100, **values), row("v02_tiled", 80, **values, **ends, status="unconverged")]
    rows += [row("v07_tuned", 99.9, **values, **even, flags=f"{store.BUSY}; {store.HOST_BOUND}")]
    folder = tmp_path / "results" / "nvidia-h200" / "r1"
    folder.mkdir(parents=True)
    store.write(store.to_table(rows), folder / "0000-000.parquet")
    (tmp_path / "runs").mkdir()
    console = Console(record=True, width=200)
    print_summary(console, tmp_path / "results", "r1", Plan([], {}, {}), RunProgress(tmp_path / "runs"))
    return console.export_text()


def test_each_ratio_has_its_interval(shown: str):
    assert "% of PyTorch" in shown and "125.0 ± 5.0" in shown and "100.1 ± 0.2 tie" in shown


def test_what_to_know_before_trusting_a_row_is_said(shown: str):
    assert f"Note: 1 of 3 cases: {store.BUSY}." in shown and f"Note: 1 of 3 cases: {store.HOST_BOUND}." in shown


def test_what_comes_next_is_the_report_of_these_rows(shown: str, tmp_path: Path):
    assert f"minfer report {tmp_path}/results/nvidia-h200/r1" in shown.replace("'", "")
    assert "timing.cold_cap_s=10 gives each case more time" in shown


def test_each_model_of_gpu_has_a_table_of_its_own(tmp_path: Path):
    values = {
        "dtype": "float16",
        "params": {"layout": "TN"},
        "shape": {"m": 512, "n": 512, "k": 512},
        "metric": "TFLOP/s",
    }
    rows = [row("torch", 100, **values, device=f"NVIDIA {model}", case=f"on {model}") for model in ("L40S", "A100")]
    (tmp_path / "runs").mkdir()
    folder = tmp_path / "results" / "nvidia-l40s" / "r1"
    folder.mkdir(parents=True)
    store.write(store.to_table(rows), folder / "0000-000.parquet")
    console = Console(record=True, width=200)
    print_summary(console, tmp_path / "results", "r1", Plan([], {}, {}), RunProgress(tmp_path / "runs"))
    text = console.export_text()
    assert "r1: hgemm on NVIDIA L40S" in text and "r1: hgemm on NVIDIA A100" in text


def test_the_time_left_is_rounded_before_it_is_split_into_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RunProgress, "_left_s", lambda self: 539.7)
    assert RunProgress(tmp_path).line().endswith(", about 9:00 min left")
