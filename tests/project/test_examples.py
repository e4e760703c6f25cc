"""The scripts of `examples/`, shortened: what they print and write."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
import torch

from minfer.specialise.background import Background
from minfer.specialise.recipes import SEQ_SUM_LLVM
from tests.conftest import ROOT
from tests.specialise.adapting import FASTER


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Serving that adapts


@pytest.mark.slow
def test_serving_prints_its_tables_and_writes_its_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the example for seconds instead of a minute, with variants that need no trial."""
    pytest.importorskip("llvmlite")
    monkeypatch.chdir(tmp_path)
    serving, threads = example("adaptive_serving"), torch.get_num_threads()
    monkeypatch.setattr(serving, "SECONDS", 6.0)
    monkeypatch.setattr(serving, "chosen", lambda: SEQ_SUM_LLVM)
    monkeypatch.setattr(Background, "outcome", lambda self, key: FASTER)
    monkeypatch.setattr("minfer.specialise.specialiser.known", lambda *about: None)
    try:
        assert serving.main([]) == 0
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    ways = re.findall(r"^\| ([a-z, ]+) \| ([\d.]+)% \| [\d.e+]+ \| [\d.e+]+ \|$", said, re.MULTILINE)
    assert [way for way, _ in ways] == list(serving.WAYS)
    assert float(ways[0][1]) > 10 and {share for _, share in ways[1:]} == {"0.0"}
    tried = re.findall(r"^\| seq_sum_llvm (\d+) \| faster \| 2.00 \| 2.0 \| 2000000 \|$", said, re.MULTILINE)
    assert tried and {int(length) for length in tried} <= {*serving.LENGTHS[0], *serving.LENGTHS[1]}
    assert re.search(r"^variants in use: [1-6], \d+ bytes$", said, re.MULTILINE)
    assert "In the last quarter adaptive was " in said
    plot = (tmp_path / "adaptive-serving.svg").read_text()
    assert plot.count("<svg") == 1 and len(plot) > 10_000


# Fusing two loops


def test_two_loops_are_fused_timed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llvmlite")
    fusing = example("llvm_fusion")
    assert fusing.main(["--rounds=6", "--most=8192", f"--write={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "define void @fused(" in said
    lines = re.findall(r"^\| (\d+) \| [\d.e+]+ \| [\d.e+]+ \| [\d.]+ \([\d.]+ to [\d.]+\) \w+ \|", said, re.MULTILINE)
    assert lines == ["1024", "8192"]
    (path,) = (tmp_path / "benchmarks" / "results").glob("llvm-fusion-*.parquet")
    rows = pq.read_table(path).to_pylist()
    assert [row["elements"] for row in rows] == [1024, 8192] and all(row["commit"] and row["device"] for row in rows)
    assert all(len(row[name]) == 6 for row in rows for name in ("two_us", "again_us", "fused_us"))


def test_loops_are_fused_only_where_the_second_reads_what_the_first_wrote() -> None:
    fusing = example("llvm_fusion")
    body = fusing.fused(fusing.SCALE, fusing.ADD)
    assert body.count("load float") == 2 and "%y.v" not in body  # a and b; y stays in a register
    for first, second in ((fusing.SCALE, fusing.SCALE), (fusing.ADD.replace("%result", "%other"), fusing.ADD)):
        assert fusing.fused(first, second) is None


def test_a_wrong_fusion_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    fusing = example("llvm_fusion")
    right = fusing.fused
    monkeypatch.setattr(fusing, "fused", lambda *two: (right(*two) or "").replace("fadd", "fsub") or None)
    with pytest.raises(AssertionError, match="not close"):
        fusing.main(["--rounds=6", "--most=1024"])


def test_what_it_cannot_time_is_a_sentence() -> None:
    fusing = example("llvm_fusion")
    for words in (["--rounds=5"], ["--most=100"]):
        with pytest.raises(SystemExit, match=r"^llvm_fusion.py takes --rounds of at least 6"):
            fusing.main(words)
