"""`benchmarks/decoder_split.py` and `serve_trace.py`, on a CPU with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import decoder_split, serve_trace
from minfer import ops
from minfer.bench.operands import Operands
from minfer.models import weights
from minfer.models.named import named
from minfer.models.serve import POLICIES, Engine
from minfer.models.sources import Random

CPU = torch.device("cpu")
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\nx,30,2\nx,70,3\nx,0,1\n"


def test_each_operation_of_a_step_is_recorded_once_a_layer() -> None:
    case = decoder_split.case_of("tiny", 2, 64)
    calls = decoder_split.record(Operands(ops.get("decoder"), case, 0, "normal", CPU))
    layers = dict.fromkeys(("qkv", "out", "gate_up", "down", "rope_append", "decode_attention", "silu_mul"), 2)
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
    words = [str(path), "--model", "tiny", "--device", "cpu", "--dry", "--rate", "1000", "--policy", *POLICIES]
    assert serve_trace.main([*words, "--pages", "20", "--most", "2", "--chunk", "64"]) == 0
    said = capsys.readouterr().out
    assert said.count("'generated': 6") == 6
    assert "first_p99_ms" in said


def test_every_bucket_of_a_trace_is_captured_before_it_is_served() -> None:
    decoder = weights.build(named("tiny"), Random(), "cpu", torch.bfloat16)
    engine = Engine(decoder, pages=9, page=serve_trace.PAGE, most=3, chunk=64, graphs=True)
    serve_trace.warm_up(engine, [serve_trace.Asked(100, 30)])
    assert engine.graphs is not None
    assert engine.graphs.captured.keys() == {(rows, width) for rows in (1, 2, 4) for width in (1, 2, 4)}
    assert serve_trace.serve_all(engine, [serve_trace.Asked(100, 30), serve_trace.Asked(5, 2)], CPU)["generated"] == 32
    assert len(engine.graphs.captured) == 9


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--rate", "0"], "'0' is not a number above 0"),
        (["--requests", "none"], "'none' is not a whole number from 1"),
        (["--policy", "fair"], "invalid choice: 'fair'"),
    ],
)
def test_arguments_that_are_no_numbers_are_refused(
    words: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serve_trace.main([str(tmp_path), "--device", "cpu", *words])
    assert error in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_bytes(bytes(range(256)))
    for path in (tmp_path / "none.csv", tmp_path / "trace.csv", tmp_path):
        with pytest.raises(SystemExit, match=r"cannot be read as a trace: .*\w"):
            serve_trace.read(path, 5)


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
