"""`minfer.silu_mul`: an op like PyTorch's own, with a backward."""

from __future__ import annotations

import pytest
import torch

from minfer import ops, silu_mul
from minfer.ops.silu_mul import U

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def pair(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return (scale * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)


def eager(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(gate.double()) * up.double()).to(gate.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 24), (3, 77), (1,), (2, 3, 16), (0, 8), (4, 0)])
def test_it_agrees_with_the_definition(shape, dtype):
    gate, up = pair(*shape, dtype=dtype)
    torch.testing.assert_close(silu_mul(gate, up), eager(gate, up))


def test_tensors_that_lie_badly():
    projection = torch.randn(2, 3, 48).half()
    wide = torch.randn(7, 29).half()
    for gate, up in (
        projection.chunk(2, -1),  # read as they lie
        (wide[1:, 3:27], wide[:6, 1:25]),
        (wide[:, 0:24:2], wide.flip(0)[:, :12]),
        (wide[:1, :24].expand(6, -1), wide[1:, :24]),
        (wide.t(), wide.t()),
    ):
        result = silu_mul(gate, up)
        assert result.is_contiguous()
        torch.testing.assert_close(result, eager(gate, up))


@pytest.mark.parametrize(
    "x", [0.0, -0.0, 30.0, -30.0, 88.5, -88.5, 104.0, -104.0, 1e30, -1e30, float("inf"), float("nan")]
)
def test_extreme_gates_keep_the_sign_and_the_limit(x):
    gate = torch.full((1, 8), x)
    expected = eager(gate, torch.ones(1, 8)) if x != -1e30 else torch.full((1, 8), -0.0)  # -1e30 * 0
    torch.testing.assert_close(silu_mul(gate, torch.ones(1, 8)), expected, rtol=1e-4, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 7), (0, 8)])
def test_its_gradients_are_those_of_the_definition(shape, dtype):
    gate, up = pair(*shape, dtype=dtype, scale=4.0)
    dy = torch.randn(shape).to(dtype)
    found, wanted = [], []
    for function, to in ((silu_mul, found), (eager, wanted)):
        leaves = [tensor.clone().requires_grad_() for tensor in (gate, up)]
        function(*leaves).backward(dy)
        to.extend(leaf.grad for leaf in leaves)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_reference_of_backward_is_the_gradient_of_that_of_forward():
    op = ops.get("silu_mul")
    case = {call: op.case("torch", "float32", {"tokens": 3, "hidden": 8}, {"call": call}) for call in op.calls}

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(context, gate, up):
            context.save_for_backward(gate, up)
            return op.reference(case["forward"], {"gate": gate, "up": up})["y"].value

        @staticmethod
        def backward(context, dy):
            gate, up = context.saved_tensors
            found = op.reference(case["backward"], {"gate": gate, "up": up, "dy": dy})
            return found["d_gate"].value, found["d_up"].value

    inputs = [(4 * torch.randn(3, 8, dtype=torch.float64)).requires_grad_() for _ in range(2)]
    assert torch.autograd.gradcheck(Reference.apply, inputs)


def test_its_bound_is_small_beside_the_rounding_of_a_half():
    op = ops.get("silu_mul")
    case = op.case("torch", "float16", {"tokens": 1, "hidden": 1})
    expected = op.reference(case, {"gate": torch.full((1, 1), 8.0).double(), "up": torch.ones(1, 1).double()})["y"]
    assert expected.bound is not None and 0 < float(expected.bound) < 64 * U * float(expected.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_an_op_like_pytorchs_own(dtype):
    gate, up = pair(6, 24, dtype=dtype)
    torch.library.opcheck(torch.ops.minfer.silu_mul.default, (gate.requires_grad_(), up.requires_grad_()))
    torch.library.opcheck(torch.ops.minfer.silu_mul_backward.default, (gate.detach(), up.detach(), up.detach()))


def test_it_compiles_whole_and_for_any_shape_with_its_backward():
    compiled = torch.compile(lambda gate, up: silu_mul(gate, up) + 1, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (6, 7):
        leaves = [tensor.requires_grad_() for tensor in pair(tokens, 16)]
        compiled(*leaves).sum().backward()
        others = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        (eager(*others) + 1).sum().backward()
        for mine, theirs in zip(leaves, others, strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_mistakes_are_a_sentence_each():
    gate, up = pair(6, 24)
    for mine, theirs, said in (
        (gate, up[:5], r"takes up of \(6, 24\), got \(5, 24\)"),
        (gate, up.half(), "takes up of the dtype of gate, torch.float32, got torch.float16"),
        (gate, up.to("meta"), "takes up on the device of gate, cpu, got meta"),
        (gate.double(), up.double(), "takes gate of float32, float16 or bfloat16, got torch.float64"),
        (gate.sum(), up.sum(), r"takes gate of \(\.\.\., hidden\), got \(\)"),
    ):
        with pytest.raises(ValueError, match=f"^minfer.silu_mul {said}$"):
            silu_mul(mine, theirs)
