"""Tasks of others, and which of them are refused by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minfer import build, cli, ops
from minfer.bench.verify import WrongResult, verify
from minfer.board.adapt import adapt
from minfer.board.foreign import Refused, describe_outputs
from minfer.board.montecarlo import spread
from minfer.board.tasks import load_task, register, write_extra
from minfer.ops import Op
from minfer.ops.op import REGISTERED

TASKS = Path(__file__).parent / "tasks"
KINDS = sorted(path.stem for path in TASKS.glob("*.py"))
TASK = """
import torch

class Model(torch.nn.Module):
    def forward(self, {names}):
        return {result}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""
X = "torch.randn(4, 6)"


@pytest.fixture(autouse=True)
def registered(one_thread: None) -> Iterator[None]:
    """Ops of a test are forgotten after it."""
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


def make(name: str, tmp_path: Path) -> Op:
    return register(TASKS / f"{name}.py", f"task_{name}", tmp_path / "extra.py")


@pytest.mark.parametrize("name", KINDS)
def test_a_task_of_each_kind_becomes_an_op(name: str, tmp_path: Path) -> None:
    op = make(name, tmp_path)
    case = op.case("torch", "float32", {"trial": 1})
    errors = verify(
        op, case, op.kernels["torch"], build.function(op.kernels["torch"], ""), torch.device("cpu"), None, 0
    )
    assert 0 < errors.over_bound < 0.8


@pytest.mark.parametrize("name", KINDS)
def test_a_result_in_half_precision_is_wrong(name: str, tmp_path: Path) -> None:
    """The bounds are of fp32: they find a kernel that computes with 11 bits, which 1e-2 would accept."""
    op = make(name, tmp_path)
    right = build.function(op.kernels["torch"], "")

    def halved(*tensors: torch.Tensor, **call: object) -> None:
        right(*tensors, **call)
        for tensor, spec in zip(tensors, op.specs(case), strict=True):
            if spec.role == "out":
                tensor.copy_(tensor.half().float())

    case = op.case("torch", "float32", {"trial": 1})
    with pytest.raises(WrongResult):
        verify(op, case, op.kernels["torch"], halved, torch.device("cpu"), None, 0)


@pytest.mark.parametrize(
    ("names", "result", "inputs", "words"),
    [
        ("x", "x * 0", X, "output 0 is zero"),
        ("x", "torch.softmax(x, 1).sum(1).round()", X, "output 0 is constant"),
        ("x, y", "x + 1", f"{X}, {X}", "input1 does not matter"),
        ("x", "torch.nn.functional.dropout(x, 0.5)", X, "its output is random"),
        ("x", "x / 0", X, "not finite"),
        ("x", "x.argmax(1)", X, "an op's outputs are floating-point tensors"),
        ("x", "x.missing()", X, "cannot be run: AttributeError"),
        ("x", "x.float()", f"{X} > 0", "input 0 of task odd is torch.bool"),
    ],
)
def test_a_degenerate_task_is_refused_by_name(names: str, result: str, inputs: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(TASK.format(names=names, result=result, inputs=inputs))
    with pytest.raises(Refused, match=words) as caught:
        load_task(file, "odd")
    assert "odd" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_in_another_form_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text("def get_inputs(): pass")
    with pytest.raises(Refused, match="has no Model"):
        load_task(file, "odd")
    with pytest.raises(Refused, match="there is an op softmax already"):
        write_extra(TASKS / "conv.py", "softmax", tmp_path)


def test_outputs_below_their_tolerance_are_noted(tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    file.write_text(TASK.format(names="x", result="x * 1e-4", inputs=X))
    assert describe_outputs(load_task(file, "small").outputs) == [
        "output 0 is below 0.01 everywhere: under an absolute tolerance zeros would pass"
    ]
    assert not describe_outputs(load_task(TASKS / "norm.py", "norm").outputs)


def test_the_written_file_registers_the_op(tmp_path: Path) -> None:
    path, _ = write_extra(TASKS / "loss.py", "their_loss", tmp_path)
    ops.load_file(path)
    op = ops.get("their_loss")
    names = [spec.name for spec in op.specs(op.case("torch", "float32", {"trial": 2}))]
    assert op.source == path and op.drawn is not None and names == ["y0", "input0", "input1"]


def test_the_command_says_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["import-task", str(TASKS / "conv.py"), "--name", "their_conv", "-o", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["minfer", "board", *words])
    assert cli.main() == 0
    assert f"minfer board open-season their_conv --extra {tmp_path / 'their_conv.py'}" in capsys.readouterr().out
    words = [
        "open-season",
        "their_conv",
        "--extra",
        str(tmp_path / "their_conv.py"),
        "--board",
        str(tmp_path / "board"),
    ]
    monkeypatch.setattr(sys, "argv", ["minfer", "board", *words, "--device", "cpu"])
    assert cli.main() == 0
    assert "their_conv-cpu-1 is open" in capsys.readouterr().out


def test_their_solutions_are_submissions(tmp_path: Path) -> None:
    op = make("norm", tmp_path)
    file = tmp_path / "solution.py"
    text = (TASKS / "norm.py").read_text().replace("class Model", "class ModelNew")
    file.write_text(text.replace("return self.norm(x)", "return self.norm(x) * 1.0"))
    case = op.case("torch", "float32", {"trial": 1})
    verify(op, case, op.kernels["torch"], adapt(op.name, str(file)), torch.device("cpu"), None, 0)


def test_the_spread_of_a_product_is_that_of_a_dot_product() -> None:
    a, b = torch.randn(8, 400, dtype=torch.float64), torch.randn(400, 8, dtype=torch.float64)
    (found,) = spread(lambda: (a @ b,), (a @ b,))
    expected = 400**0.5 * 2.0**-24 * (a.abs() @ b.abs())
    assert torch.all(found < 3 * expected) and torch.all(found.mean() > 0.7 * expected.mean())
