"""`minfer.gemm_bias_relu` and `minfer.gemm_bias_gelu`: right for what a user may bring, and ops like PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from minfer import gemm_bias_gelu, gemm_bias_relu

Biased = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, tuple[Biased, Callable[[torch.Tensor], torch.Tensor]]] = {
    "relu": (gemm_bias_relu, torch.relu),
    "gelu": (gemm_bias_gelu, F.gelu),
    "gelu by tanh": (lambda a, b, bias: gemm_bias_gelu(a, b, bias, "tanh"), lambda h: F.gelu(h, approximate="tanh")),
}


def operands(m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(m + 7 * n + 13 * k)
    return [each.to(dtype) for each in (torch.randn(m, k), torch.randn(k, n) * max(k, 1) ** -0.5, torch.randn(n))]


def right(name: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> None:
    """Raises unless the result is what the definition gives in fp64, rounded once; near 0 a bias may cancel the product."""
    function, activation = FUNCTIONS[name]
    want = activation(a.double() @ b.double() + bias.double())
    torch.testing.assert_close(function(a, b, bias), want.to(a.dtype), rtol=2 * torch.finfo(a.dtype).eps, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(33, 64, 40), (1, 1, 8), (5, 7, 1), (0, 8, 8), (4, 0, 8), (4, 8, 0)], ids=str)
def test_they_are_the_definition(name: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    a, b, bias = operands(*shape, dtype)
    right(name, a, b, bias)
    right(name, a, b.t().contiguous().t(), bias)  # as `nn.Linear` keeps it


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_gelu_makes_of_large_values_and_of_no_number(name: str) -> None:
    function, activation = FUNCTIONS[name]
    h = torch.tensor([300.0, -300.0, 0.0, 1e4, -1e4, float("nan")]).bfloat16()
    zero = torch.zeros(1, 6, dtype=torch.bfloat16)
    torch.testing.assert_close(function(zero[:, :1], zero, h)[0], activation(h), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_views_that_lie_badly_are_read_as_they_are(name: str) -> None:
    """Rows that start at no multiple of 16 bytes, rows and columns with gaps, a transposed a, and a bias with a stride."""
    a, b, bias = operands(24, 40, 32)
    ways: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {
        "a from its second element": (moved(a, 1), b, bias),
        "b from its second element": (a, moved(b, 1), bias),
        "b transposed, from its second element": (a, moved(b.t(), 1).t(), bias),
        "bias from its second element": (a, b, moved(bias[None], 1)[0]),
        "a with gaps between rows": (moved(a, 0, 8), b, bias),
        "b with gaps between rows": (a, moved(b, 0, 8), bias),
        "b transposed, with gaps": (a, moved(b.t(), 0, 3).t(), bias),
        "a with gaps between columns": (a.repeat_interleave(2, 1)[:, ::2], b, bias),
        "b with gaps between columns": (a, b.repeat_interleave(2, 1)[:, ::2], bias),
        "bias with gaps": (a, b, bias.repeat_interleave(3)[::3]),
        "a transposed": (a.t().contiguous().t(), b, bias),
        "one bias for all": (a, b, bias[:1].expand(32)),
        "one row for all": (a[:1].expand(24, -1), b, bias),
    }
    for what, operand in ways.items():
        kept = [tensor.clone() for tensor in operand]
        right(name, *operand)
        assert all(map(torch.equal, operand, kept)), what


def moved(x: torch.Tensor, first: int, gap: int = 0) -> torch.Tensor:
    """The same numbers, from the element `first` of a larger tensor, whose other elements are NaN."""
    rows, n = x.shape
    around = torch.full((first + rows * (n + gap),), float("nan"), dtype=x.dtype)
    view = around[first:].view(rows, n + gap)[:, :n]
    return view.copy_(x)


def test_opcheck() -> None:
    a, b, bias = operands(16, 32, 24)
    for which in (b, b.t().contiguous().t()):
        torch.library.opcheck(torch.ops.minfer.gemm_bias_relu.default, (a, which, bias))
        for approximate in ("none", "tanh"):
            torch.library.opcheck(torch.ops.minfer.gemm_bias_gelu.default, (a, which, bias, approximate))


def test_they_run_under_torch_compile() -> None:
    a, b, bias = operands(16, 32, 24)
    both = lambda a, b, bias: (gemm_bias_gelu(a, b, bias, approximate="tanh"), gemm_bias_relu(a, b, bias))
    compiled = torch.compile(both, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b, bias), both(a, b, bias))


def test_mistakes_are_a_sentence_each() -> None:
    a, b, bias = operands(4, 8, 16)
    for wrong, sentence in (
        ((a.float(), b, bias), "minfer.gemm_bias_gelu takes a of float16 or bfloat16, got torch.float32"),
        ((a, b.half(), bias), "takes b of the dtype of a, torch.bfloat16, got torch.float16"),
        ((a, b.t(), bias), r"takes b of \(8, n\), got \(16, 8\)"),
        ((a, b, bias[:3]), r"takes bias of \(16,\), got \(3,\)"),
        ((a, b, bias, "erf"), "takes approximate='none' or 'tanh', got 'erf'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            gemm_bias_gelu(*wrong)
    with pytest.raises(RuntimeError, match=r"^minfer\.gemm_bias_gelu has no backward"):
        gemm_bias_gelu(a.requires_grad_(), b, bias)
