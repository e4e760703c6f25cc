"""`minfer.silu_mul_quant` and `minfer.rms_norm_quant`: rows of bytes and their scales, which give the values again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import minfer
from minfer import rms_norm_quant, silu_mul_quant

Tensor = torch.Tensor
FP8, INT8 = torch.float8_e4m3fn, torch.int8
STEP = {
    FP8: 2.0**-4,
    INT8: 0.5 / 127,
}  # half of it is the largest error, relative to a value or to the largest of its row


def check(y: Tensor, scales: Tensor, values: Tensor, dtype: torch.dtype) -> None:
    """Half a step for the byte, and an ulp of fp16 or bfloat16 for values that were rounded before."""
    most, size = (448 if dtype == FP8 else 127), values.abs().amax(-1)
    assert y.dtype == dtype and y.shape == values.shape and scales.shape == values.shape[:-1]
    torch.testing.assert_close(scales.double(), size / most, rtol=2e-2, atol=0)
    error = (y.double() * scales.double()[..., None] - values).abs()
    of_value = values.abs() if dtype == FP8 else size[..., None]
    assert (error <= of_value * (STEP[dtype] * 1.01 + 2e-2) + size[..., None] * 2.0**-18).all()


@pytest.mark.parametrize("to", [FP8, INT8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 64), (2, 2, 77), (5,)])
def test_bytes_times_scales_are_the_values(shape, dtype, to):
    torch.manual_seed(0)
    x, other, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    check(*silu_mul_quant(x, other, to), F.silu(x.double()) * other.double(), to)
    wanted = F.rms_norm(x.double(), weight.shape, weight.double(), 1e-6)
    check(*rms_norm_quant(x, weight, dtype=to), wanted, to)
    total = other.clone()
    y, scales = rms_norm_quant(x, weight, residual=total, dtype=to)
    assert torch.equal(total, other + x)
    check(y, scales, F.rms_norm(total.double(), weight.shape, weight.double(), 1e-6), to)


@pytest.mark.parametrize("to", [FP8, INT8])
def test_the_largest_value_of_a_row_is_the_largest_byte_and_zeros_stay_zeros(to):
    x = torch.tensor([[0.5, -3.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    y, scales = rms_norm_quant(x, torch.ones(4), dtype=to)
    assert y[0].double().abs().max() == (448 if to == FP8 else 127)
    assert scales[1] == 0 and not y[1].double().any()
    y, scales = silu_mul_quant(x, x, to)
    assert scales[1] == 0 and not y[1].double().any()


def test_a_product_takes_the_bytes_and_the_scales():
    torch.manual_seed(0)
    gate, up = torch.randn(4, 256).half().chunk(2, -1)
    w = (torch.randn(16, 128) / 8).to(FP8)
    y, scales = silu_mul_quant(gate, up)
    found = minfer.quant_gemm(y, w, "fp8", torch.ones(16), x_scales=scales, dtype=torch.float16)
    wanted = (F.silu(gate.float()) * up.float()) @ w.float().t()
    assert (found.float() - wanted).norm() < 0.05 * wanted.norm()


def test_no_row_and_no_column_are_no_work():
    for shape in ((0, 64), (3, 0)):
        x, weight = torch.rand(shape), torch.rand(shape[-1])
        for y, scales in (
            silu_mul_quant(x, x),
            rms_norm_quant(x, weight),
            rms_norm_quant(x, weight, residual=x.clone()),
        ):
            assert y.shape == shape and torch.equal(scales, torch.zeros(shape[:-1]))


def test_what_lies_badly_is_copied():
    torch.manual_seed(0)
    x, weight = torch.randn(6, 64).half(), torch.randn(64).half()
    wide = torch.zeros(6, 131).half()
    wide[:, 1:65] = x
    wide[:, 66:130] = x
    for mine, theirs in zip(
        silu_mul_quant(wide[:, 1:65], wide[:, 66:130], INT8), silu_mul_quant(x, x, INT8), strict=True
    ):
        assert torch.equal(mine, theirs)
    residual = wide[:, 66:130]
    total = x.clone()
    found, wanted = (
        rms_norm_quant(x, weight, residual=residual, dtype=INT8),
        rms_norm_quant(x, weight, residual=total, dtype=INT8),
    )
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    assert torch.equal(residual, total) and not wide[:, 65].any() and not wide[:, 130].any()


def test_they_are_ops_like_pytorchs_own():
    x, weight = torch.randn(3, 8), torch.randn(8)
    ops = torch.ops.minfer
    torch.library.opcheck(ops.silu_mul_quant.default, (x, x, INT8))
    torch.library.opcheck(ops.rms_norm_quant.default, (x, weight, 1e-6, INT8))
    torch.library.opcheck(ops.add_rms_norm_quant.default, (x, x.clone(), weight, 1e-6, INT8))


def test_they_compile_whole_and_for_any_shape():
    def step(x: Tensor, weight: Tensor, residual: Tensor) -> Any:
        y, scales = rms_norm_quant(x, weight, residual=residual, dtype=INT8)
        return y, scales + 1, silu_mul_quant(x, residual, INT8)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (3, 5):
        x, weight, residual = torch.randn(tokens, 8), torch.randn(8), torch.randn(tokens, 8)
        found, wanted = compiled(x, weight, residual.clone()), step(x, weight, residual.clone())
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_mistakes_are_a_sentence_each():
    x, weight = torch.randn(3, 8), torch.randn(8)
    for call, said in (
        (lambda: silu_mul_quant(x, x, torch.int32), "silu_mul_quant takes a dtype of float8_e4m3fn or int8, got torch.int32"),
        (lambda: silu_mul_quant(x.double(), x), "silu_mul_quant takes gate of float32, float16 or bfloat16, got torch.float64"),
        (lambda: silu_mul_quant(x[0, 0], x), r"silu_mul_quant takes gate of \(..., hidden\), got \(\)"),
        (lambda: silu_mul_quant(x, x[:2]), r"silu_mul_quant takes up of \(3, 8\), got \(2, 8\)"),
        (lambda: rms_norm_quant(x, weight[:4]), r"rms_norm_quant takes weight of \(8,\), got \(4,\)"),
        (lambda: rms_norm_quant(x, weight, residual=x[:2]), r"rms_norm_quant takes residual of \(3, 8\), got \(2, 8\)"),
        (
            lambda: rms_norm_quant(x, weight, residual=x.half()),
            "rms_norm_quant takes residual of the dtype of x, torch.float32, got torch.float16",
        ),
        (lambda: rms_norm_quant(x, weight.to("meta")), "rms_norm_quant takes weight on the device of x, cpu, got meta"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^minfer.{said}$"):
            call()
    with pytest.raises(RuntimeError, match=r"^minfer.rms_norm_quant has no backward: call it under torch.no_grad\(\)"):
        rms_norm_quant(x.requires_grad_(), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("to", [FP8, INT8])
@pytest.mark.parametrize("hidden", [4096, 77])
def test_a_graph_repeats_them_with_the_same_bits(hidden, to):
    x, other, weight = torch.randn(5, hidden).cuda(), torch.randn(5, hidden).cuda(), torch.rand(hidden).cuda()

    def both() -> list[Tensor]:
        return [*silu_mul_quant(x, other, to), *rms_norm_quant(x, weight, residual=other.clone(), dtype=to)]

    wanted = both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both()
    for _ in range(2):
        for each in found:
            each.view(torch.uint8).fill_(0)
        graph.replay()
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, wanted, strict=True))
