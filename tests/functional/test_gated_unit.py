"""`minfer.gated_unit` and `minfer.swiglu`: right for what a user may bring, and ops like PyTorch's own."""

from __future__ import annotations

import pytest
import torch

from minfer import gated_unit, swiglu

HALVES = [torch.float16, torch.bfloat16]


def operands(m: int, k: int, n: int, dtype: torch.dtype, tn: bool = False) -> list[torch.Tensor]:
    """x, w1, b1, w2, b2."""
    torch.manual_seed(m + 7 * n + 13 * k)
    one, two = (torch.randn(n, k).t() if tn else torch.randn(k, n) for _ in range(2))
    scale = max(k, 1) ** -0.5
    made = [torch.randn(m, k), one * scale, torch.randn(n), two * scale, torch.randn(n)]
    return [tensor.to(dtype) for tensor in made]


def right(y: torch.Tensor, x: torch.Tensor, *parameters: torch.Tensor) -> None:
    """Raises unless y is what the definition gives in fp32."""
    x, *wide = (tensor.float() for tensor in (x, *parameters))
    if len(wide) == 4:
        w1, b1, w2, b2 = wide
        expected = (x @ w1 + b1).sigmoid() * (x @ w2 + b2)
    else:
        expected = torch.nn.functional.silu(x @ wide[0]) * (x @ wide[1])
    torch.testing.assert_close(y, expected.to(y.dtype), rtol=2 * torch.finfo(y.dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tn", [False, True])
@pytest.mark.parametrize("shape", [(33, 64, 40), (1, 1, 8), (5, 7, 1), (0, 8, 8), (4, 0, 8), (4, 8, 0), (1, 1, 1)])
def test_they_are_the_definition(shape, tn, dtype):
    x, w1, b1, w2, b2 = operands(*shape, dtype, tn)
    right(gated_unit(x, w1, b1, w2, b2), x, w1, b1, w2, b2)
    right(swiglu(x, w1, w2), x, w1, w2)


def test_x_may_have_any_dimensions():
    x, w1, b1, w2, b2 = operands(24, 16, 8, torch.float16)
    for shape in ((2, 3, 4, 16), (24, 16), (0, 3, 16)):
        part = x[: torch.Size(shape).numel() // 16].reshape(shape)
        assert gated_unit(part, w1, b1, w2, b2).shape == (*shape[:-1], 8)
        right(gated_unit(part, w1, b1, w2, b2), part, w1, b1, w2, b2)
    right(swiglu(x[0], w1, w2), x[0], w1, w2)


def test_tensors_that_lie_badly_are_copied():
    x, w1, b1, w2, b2 = operands(6, 24, 16, torch.bfloat16)
    wide = torch.randn(40, 57).bfloat16()
    misaligned, spread = wide[1:25, 3:19], wide.t()[:48:2, :32:2]
    for first, second in ((misaligned, w2), (spread, w2), (w1, w2.t().contiguous().t()), (w1.t().contiguous().t(), w2)):
        right(gated_unit(x, first, b1, second, b2), x, first, b1, second, b2)
        right(swiglu(x, first, second), x, first, second)
    bias = wide[0, 1:17]
    for left in (x.flip(0), wide[1:7, 3:27], x[:1].expand(6, -1), x.reshape(2, 3, 24).transpose(0, 1)):
        right(gated_unit(left, w1, bias, w2, wide[:16, 0]), left, w1, bias, w2, wide[:16, 0])


def test_a_gate_that_is_shut_or_open_is_zero_or_one():
    x, w = torch.ones(1, 8).half(), torch.zeros(8, 8).half()
    shut, open_, one = (torch.full((8,), value).half() for value in (-65504.0, 65504.0, 1.0))
    assert gated_unit(x, w, shut, w, one).eq(0).all() and gated_unit(x, w, open_, w, one).eq(1).all()


@pytest.mark.parametrize("tn", [False, True])
def test_they_are_ops_like_pytorchs_own(tn):
    x, w1, b1, w2, b2 = operands(6, 24, 16, torch.float16, tn)
    torch.library.opcheck(torch.ops.minfer.gated_unit.default, (x, w1, b1, w2, b2))
    torch.library.opcheck(torch.ops.minfer.swiglu.default, (x, w1, w2))


def test_they_compile_whole_and_for_any_number_of_rows():
    def both(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor) -> torch.Tensor:
        return gated_unit(x, w1, b1, w2, b2) + swiglu(x, w1, w2)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=True)
    for m in (6, 7):
        made = operands(m, 24, 16, torch.bfloat16)
        torch.testing.assert_close(compiled(*made), both(*made))


def test_mistakes_are_a_sentence_each():
    x, w1, b1, w2, b2 = operands(6, 24, 16, torch.float16)
    for arguments, said in (
        ((x[:, :8], w1, b1, w2, b2), r"w1 of \(8, n\), got \(24, 16\)"),
        ((x, w1, b1, w2[:, :8], b2), r"w2 of \(24, 16\), got \(24, 8\)"),
        ((x, w1[0], b1, w2, b2), r"w1 of \(24, n\), got \(16,\)"),
        ((x, w1, b1[:1], w2, b2), r"b1 of \(16,\), got \(1,\)"),
        ((x, w1, b1, w2, b2[None]), r"b2 of \(16,\), got \(1, 16\)"),
        ((x, w1, b1, w2.float(), b2), "w2 of the dtype of x, torch.float16, got torch.float32"),
        ((x.float(), w1, b1, w2, b2), "x of float16 or bfloat16, got torch.float32"),
        ((x, w1, b1.to("meta"), w2, b2), "b1 on the device of x, cpu, got meta"),
        ((x[0, 0], w1, b1, w2, b2), r"x of \(\.\.\., k\), got \(\)"),
    ):
        with pytest.raises(ValueError, match=f"^minfer.gated_unit takes {said}$"):
            gated_unit(*arguments)
    with pytest.raises(ValueError, match=r"^minfer.swiglu takes wu of \(24, 16\), got \(24, 8\)$"):
        swiglu(x, w1, w2[:, :8])
    w1.requires_grad_()
    for name, call in (("gated_unit", lambda: gated_unit(x, w1, b1, w2, b2)), ("swiglu", lambda: swiglu(x, w1, w2))):
        with pytest.raises(RuntimeError, match=rf"^minfer.{name} has no backward: call it under torch.no_grad\(\)"):
            call()
        with torch.no_grad():
            assert call().shape == (6, 16)
