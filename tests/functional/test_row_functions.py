"""`minfer.rms_norm`, `layer_norm` and `softmax`: they compute what PyTorch's own do, as ops like PyTorch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from minfer import build, layer_norm, ops, rms_norm, softmax
from minfer.bench.device import capability, pick
from minfer.build import toolchain
from minfer.ops.rmsnorm_backward import gradients

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(5, 40), (3, 7), (2, 3, 16), (9,), (0, 8), (4, 0)]


def normalised(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float()).to(x.dtype)


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """x, a weight and a bias."""
    return [torch.randn(size).to(dtype) for size in (shape, shape[-1:], shape[-1:])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_they_are_pytorchs_own(shape, dtype):
    x, weight, bias = operands(shape, dtype)
    torch.testing.assert_close(rms_norm(x, weight), normalised(x, weight))
    torch.testing.assert_close(layer_norm(x, weight, bias), layer(x, weight, bias))
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
    torch.testing.assert_close(softmax(x, bias), torch.softmax(x.float() + bias.float(), -1).to(dtype))


def test_the_residual_is_added_in_place():
    for shape in ((5, 40), (2, 3, 7)):
        x, weight, _ = operands(shape, torch.bfloat16)
        wide = torch.randn(*shape[:-1], 50).bfloat16()
        for residual in (torch.randn(shape).bfloat16(), wide[..., 3 : 3 + shape[-1]]):
            around, total, given = wide.clone(), residual + x, x.clone()
            y = rms_norm(x, weight, residual=residual)
            assert torch.equal(residual, total) and torch.equal(x, given)
            torch.testing.assert_close(y, normalised(total, weight))
            assert torch.equal(wide[..., :3], around[..., :3]) and torch.equal(wide[..., 43:], around[..., 43:])


def test_rows_that_lie_badly_are_copied():
    weight, bias = torch.randn(16).half(), torch.randn(33).half()[::2][:16]
    whole = torch.randn(40, 37).half()
    for x in (
        whole[1:7, 3:19],
        torch.randn(16, 6).half().t(),
        whole[:6, ::2][:, :16],
        torch.randn(1, 16).half().expand(6, -1),
        torch.randn(6, 4, 16).half().transpose(0, 1),
    ):
        torch.testing.assert_close(rms_norm(x, weight), normalised(x, weight))
        torch.testing.assert_close(layer_norm(x, weight, bias), layer(x, weight, bias))
        torch.testing.assert_close(softmax(x, bias), torch.softmax(x.float() + bias.float(), -1).half())


def test_lengths_leave_the_rest_out_and_cannot_lead_out_of_bounds():
    x = torch.randn(2, 3, 20).half()
    lengths = torch.tensor([[1, 20, 7], [99, -5, 8]], dtype=torch.int32)
    beyond = torch.arange(20) >= lengths[..., None]
    y = softmax(x.masked_fill(beyond, math.nan), lengths)
    torch.testing.assert_close(y, torch.softmax(x.masked_fill(beyond, -math.inf), -1), equal_nan=True)
    assert bool(y[1, 1].isnan().all())


@pytest.mark.parametrize(
    "kernel", [kernel for kernel in ops.get("softmax").kernels.values() if "cpu" in kernel.devices]
)
def test_extreme_rows(kernel):
    """What overflows if a maximum is not taken off first, or leaves nothing when it is."""
    if kernel.name == "torch_compile":
        pytest.skip("takes seconds, and is PyTorch's own")
    check_extremes(build.function(kernel), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel", [kernel for kernel in ops.get("softmax").kernels.values() if kernel.backend in ("cuda", "triton")]
)
def test_extreme_rows_on_a_gpu(kernel):
    device = pick("cuda")
    arch = toolchain.arch_of(capability(device))
    if not kernel.builds_for(arch):
        pytest.skip(f"{kernel.archs} only")
    check_extremes(build.function(kernel, arch), device)


def check_extremes(function: Callable[..., Any], device: torch.device) -> None:
    for dtype in DTYPES:
        rows = [torch.randn(4104) for _ in range(9)]
        rows[0] *= 300
        rows[1][:] = -math.inf
        rows[2][:] = torch.finfo(dtype).max
        rows[3][:] = torch.finfo(dtype).min
        rows[4][: 4104 - 1] = -math.inf
        rows[5][0], rows[5][1] = 300.0, -300.0
        rows[6][7] = math.inf
        rows[7][8] = math.nan
        rows[8][: 4104 // 2] = -math.inf  # of whole threads and warps nothing is left
        x = torch.stack(rows).to(dtype).to(device)
        y = torch.full_like(x, 7.0)
        function(y, x, x.new_empty(0))
        expected = torch.softmax(x.double(), -1).to(dtype)
        assert bool(expected[[1, 6, 7]].isnan().all())
        torch.testing.assert_close(y, expected, equal_nan=True)


def test_the_formula_of_the_gradients():
    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            rstd = torch.rsqrt(x.square().mean(-1) + 1e-3)
            ctx.save_for_backward(x, weight, rstd)
            return x * rstd[:, None] * weight

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return gradients(dy, *ctx.saved_tensors)

    x, weight = torch.randn(4, 9).double().requires_grad_(), torch.randn(9).double().requires_grad_()
    assert torch.autograd.gradcheck(Norm.apply, (x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_has_a_backward(dtype):
    x, weight, _ = operands((2, 5, 40), dtype)
    dy = torch.randn(2, 5, 1).to(dtype).expand(-1, -1, 40)  # as a sum's, with strides of zero
    found, expected = [], []
    for results, norm in ((found, rms_norm), (expected, normalised)):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        results += torch.autograd.grad(norm(*leaves), leaves, dy)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=2e-2)


def test_they_are_ops_like_pytorchs_own():
    x, weight, bias = operands((3, 16), torch.float32)
    check, minfer = torch.library.opcheck, torch.ops.minfer
    check(minfer.rms_norm.default, (x.clone().requires_grad_(), weight.clone().requires_grad_(), 1e-6))
    check(minfer.rms_norm_backward.default, (x, x, weight, 1e-6))
    check(minfer.add_rms_norm.default, (x, x.clone(), weight, 1e-6))
    check(minfer.layer_norm.default, (x, weight, bias, 1e-5))
    for mask in (None, bias, torch.tensor([1, 2, 16], dtype=torch.int32)):
        check(minfer.softmax.default, (x, mask))


def test_they_compile_whole():
    def together(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return softmax(layer_norm(rms_norm(x, weight), weight, bias), bias) + 1

    compiled = torch.compile(together, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (6, 7):
        args = operands((tokens, 24), torch.bfloat16)
        torch.testing.assert_close(compiled(*args), together(*args))


def test_mistakes_are_a_sentence_each():
    x, weight, bias = operands((3, 16), torch.float16)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: rms_norm(x, weight[:8]), r"rms_norm takes weight of \(16,\), got \(8,\)$"),
        (
            lambda: rms_norm(x.double(), weight),
            "rms_norm takes x of float32, float16 or bfloat16, got torch.float64",
        ),
        (
            lambda: rms_norm(x, weight.float()),
            "rms_norm takes weight of the dtype of x, torch.float16, got torch.float32$",
        ),
        (lambda: rms_norm(x, weight.to("meta")), "rms_norm takes weight on the device of x, cpu, got meta$"),
        (
            lambda: rms_norm(x, weight, residual=x[:2]),
            r"rms_norm takes residual of \(3, 16\), got \(2, 16\)$",
        ),
        (lambda: layer_norm(x, weight, bias[:8]), r"layer_norm takes bias of \(16,\), got \(8,\)$"),
        (lambda: layer_norm(x[0, 0], weight, bias), r"layer_norm takes x of \(\.\.\., hidden\), got \(\)$"),
        (lambda: softmax(x.int()), "softmax takes x of float32, float16 or bfloat16, got torch.int32"),
        (
            lambda: softmax(x, bias.float()),
            "softmax takes mask of the dtype of x, torch.float16 or int32, got torch.float32$",
        ),
        (
            lambda: softmax(x, bias.int()),
            r"softmax takes mask of int32 and the shape \(3,\), got torch.int32, \(16,\)$",
        ),
        (lambda: softmax(x, bias[:8]), r"softmax takes mask of \(16,\), got \(8,\)$"),
        (lambda: softmax(x, bias.to("meta")), "softmax takes mask on the device of x, cpu, got meta$"),
        (lambda: softmax(x[0, 0]), r"softmax takes x of \(\.\.\., n\), got \(\)$"),
    ]
    for call, said in refused:
        with pytest.raises(ValueError, match=f"^minfer.{said}"):
            call()
    needs = x.clone().requires_grad_()
    for call, name in (
        (lambda: rms_norm(needs, weight, residual=x.clone()), "rms_norm with a residual"),
        (lambda: layer_norm(needs, weight, bias), "layer_norm"),
        (lambda: softmax(needs), "softmax"),
    ):
        with pytest.raises(RuntimeError, match=rf"^minfer.{name} has no backward: call it under torch.no_grad\(\)"):
            call()
        with torch.no_grad():
            call()
