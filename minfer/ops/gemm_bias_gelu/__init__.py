"""gemm_bias_gelu: y = gelu(A @ B + bias), a product whose epilogue adds a bias to each column and applies GELU.

GELU (Hendrycks and Gimpel, Gaussian error linear units, 2016) is x Phi(x). The call `erf` computes Phi by the error function;
the call `tanh` computes GPT-2's approximation by tanh.

A is (M, K), B is (K, N), bias (N,), y (M, N), all of one half type. Layouts are gemm_bias_relu's.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu

from minfer.ops import DTYPES, Case, Expected, Op, Tensors, at_most, both, compiled, within
from minfer.ops.bounds import ROUNDOFF
from minfer.ops.gemm_bias_relu import VECTORS
from minfer.ops.gemm_bias_relu import op as relu


def reference(case: Case, t: Tensors, tanh: bool) -> dict[str, Expected]:
    """The bound has two parts, for h = A B + bias and for GELU. The sum of K + 1 terms has the error of a dot product, and
    PyTorch rounds the product and h to the tensors' dtype; GELU multiplies these errors by at most 1.13, its largest slope.
    GELU itself adds 16 fp32 roundings of |h|: up to 10 come from the tanh form's exponential, whose relative error grows with
    its argument, which is up to 10 where the result is neither 0 nor h."""
    unit, terms = torch.finfo(DTYPES[case.dtype]).eps / 2, 4 * (case["k"] + 1) ** 0.5 * ROUNDOFF["float32"]
    h = t["a"] @ t["b"]
    error = (t["a"].abs() @ t["b"].abs()).add_(t["bias"].abs()).mul_(terms).add_(h.abs(), alpha=unit)
    h.add_(t["bias"])
    error.add_(h.abs(), alpha=unit).mul_(1.13).add_(h.abs(), alpha=16 * ROUNDOFF["float32"])
    return {"y": within(gelu(h, approximate=form(tanh)), error)}


def form(tanh: bool) -> str:
    """PyTorch's name for the form of GELU."""
    return "tanh" if tanh else "none"


def eager(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, tanh: bool = False) -> torch.Tensor:
    """The product with its bias, and then GELU."""
    return gelu(torch.addmm(bias, a, b), approximate=form(tanh))


def into(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, tanh: bool = False) -> None:
    """The definition, which torch.compile may fuse."""
    y.copy_(gelu(torch.addmm(bias, a, b), approximate=form(tanh)))


op = Op(
    "gemm_bias_gelu",
    axes=relu.axes,
    params=relu.params,
    calls={"erf": {"tanh": False}, "tanh": {"tanh": True}},
    tensors=relu.tensors,
    reference=reference,
    flops=relu.flops,
    arithmetic=relu.arithmetic,
    metric=relu.metric,
    strided=relu.strided,
    odd_shapes=relu.odd_shapes,
    sizes=relu.sizes,
)

op.torch("torch", eager, baseline=True, returns=(0,), requires=VECTORS)
op.torch("torch_compile", compiled(into), requires=VECTORS)
op.cuda("v01_mma.cu", requires=VECTORS)
op.cuda("v02_one_wave.cu", archs="sm_90a", requires=VECTORS, least_measured="n")
op.cuda("v03_pingpong.cu", archs="sm_90a", requires=VECTORS, preferred="gelu_under_products")
op.cuda("v04_anywhere.cu", preferred="any_length")
op.cuda("v05_fitted.cu", archs="sm_90a", requires=VECTORS, preferred="rows_of_a_prompt")
op.cuda("v06_strips.cu", archs="sm_90a", requires=both(VECTORS, at_most(m=128)), preferred="up_to_128_rows")
op.cpp("cpu_naive.cpp")
op.function(
    "gemm_bias_gelu",
    lambda minfer, y, a, b, bias, tanh: minfer.gemm_bias_gelu(a, b, bias, "tanh" if tanh else "none"),
    returns=(0,),
)
op.draws("first_product")
