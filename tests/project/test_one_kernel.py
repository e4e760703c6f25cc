"""`tools/one_kernel.py`, on the CPU."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from minfer import ops
from tools import one_kernel

SHAPE = "tokens=3,hidden=64"


def test_a_kernel_is_called_and_its_result_compared(capsys):
    assert one_kernel.main(["rmsnorm", "torch", SHAPE, "--dtype", "float32", "--device", "cpu", "--calls", "2"]) == 0
    assert capsys.readouterr().out == "rmsnorm/torch/float32//tokens=3,hidden=64 on cpu: 2 calls after 3; right\n"


def test_on_a_gpu_each_call_has_a_range_of_its_own(monkeypatch):
    """The device is played: the ranges are written down, and the calls run on the CPU."""
    told = []

    @contextmanager
    def write(name):
        told.append(name)
        yield
        told.append(f"end of {name}")

    class Played:
        type = "cuda"

    monkeypatch.setattr(torch.cuda.nvtx, "range", write)
    monkeypatch.setattr(one_kernel, "synchronize", lambda place: told.append("wait"))
    monkeypatch.setattr(one_kernel.devices, "arch", lambda place: "")
    real = one_kernel.Inputs.operands
    monkeypatch.setattr(one_kernel.Inputs, "operands", lambda inputs, op, place: real(inputs, op, torch.device("cpu")))
    case = ops.get("rmsnorm").case("torch", "float32", {"tokens": 3, "hidden": 64})
    assert one_kernel.run(case, Played(), calls=2, warm_up=1)
    calls = ["call 0", "end of call 0", "call 1", "end of call 1"]
    assert told == ["warm-up", "wait", "end of warm-up", "calls", *calls, "wait", "end of calls"]


def test_a_wrong_result_is_said(monkeypatch, capsys):
    monkeypatch.setattr(one_kernel, "matches_reference", lambda *_: False)
    assert one_kernel.main(["rmsnorm", "torch", SHAPE, "--dtype", "float32", "--device", "cpu"]) == 1
    assert capsys.readouterr().out.endswith("; WRONG\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rmsnrm", "torch", SHAPE], "unknown op 'rmsnrm'; did you mean rmsnorm"),
        (["rmsnorm", "v02_vector", SHAPE], "unknown rmsnorm kernel 'v02_vector'; did you mean v02_vectors"),
        (["rmsnorm", "torch", "tokens=3"], "'tokens=3' is no shape of rmsnorm; it has the axes tokens, hidden: write it"),
        (["rmsnorm", "torch", "3x64"], "cannot read '3x64'; write it like m=64,n=32"),
        (["rmsnorm", "torch", SHAPE, "--dtype", "float33"], "unknown dtype 'float33'; did you mean float32"),
        (["rmsnorm", "torch", SHAPE, "--params", "layout=TN"], "unknown parameter of rmsnorm 'layout'"),
        (["rmsnorm", "torch", SHAPE, "--calls", "0"], "--calls and --warm-up take numbers from 1"),
        (["rmsnorm", "v02_vectors", SHAPE, "--device", "cpu"], "rmsnorm/v02_vectors/float16//tokens=3,hidden=64: needs"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(words, told, capsys):
    assert one_kernel.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"one_kernel: {told}") and said.count("\n") == 1
