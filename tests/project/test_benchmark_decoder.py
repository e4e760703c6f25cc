"""`benchmarks/decoder_split.py` and `serve_trace.py`, on a CPU with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import decoder_split, serve_trace
from minfer import ops
from minfer.bench.operands import Operands

CPU = torch.device("cpu")
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\nx,30,2\nx,70,3\nx,0,1\n"


def test_each_operation_of_a_step_is_recorded_once_a_layer() -> None:
    case = decoder_split.case_of("tiny", 2, 64)
    calls = decoder_split.record(Operands(ops.get("decoder"), case, 0, "normal", CPU))
    layers = dict.fromkeys(("qkv", "out", "gate_up", "down", "rope_", "kv_append_", "decode_attention", "silu_mul"), 2)
    assert {name: len(each) for name, each in calls.items()} == layers | {"embedding": 1, "rms_norm": 5, "head": 1}


def test_the_rest_of_a_step_is_what_no_operation_took() -> None:
    rows = decoder_split.measure("tiny", 2, 64, CPU, 10.0, rounds=2)
    assert rows[-1]["operation"] == "step"
    assert sum(row["us"] for row in rows[:-1]) == pytest.approx(rows[-1]["us"])
    assert next(row for row in rows if row["operation"] == "qkv")["floor_us"] == 2 * 512 * 64 * 2 / 10.0 * 1e-3
    assert rows[-1]["read_bytes"] == sum(row["read_bytes"] for row in rows[:-1])


def test_a_trace_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    assert serve_trace.read(path, 2) == [serve_trace.Asked(30, 2), serve_trace.Asked(70, 3)]
    words = [str(path), "--model", "tiny", "--device", "cpu", "--dry", "--rate", "1000"]
    assert serve_trace.main([*words, "--pages", "20", "--most", "2", "--chunk", "64"]) == 0
    said = capsys.readouterr().out
    assert "'generated': 6" in said
    assert "first_p99_ms" in said


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a,b\n1,2\n", "has no column ContextTokens"),
        ("ContextTokens,GeneratedTokens\n1,x\n", "has a line that is no request"),
        ("ContextTokens,GeneratedTokens\n", "has no requests"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(SystemExit, match=error):
        serve_trace.read(path, 5)
