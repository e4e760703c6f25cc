"""The scripts of `examples/`, shortened: what they print and write."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
