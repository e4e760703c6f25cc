"""gemm_bias_relu: y = max(0, A @ B + bias), a product whose epilogue adds a bias to each column and cuts off what is negative.

A is (M, K), B is (K, N), bias (N,), y (M, N), all of one half type. The layout is the case's, as in hgemm: in `TN` B is stored
as (N, K), in `NN` as (K, N); kernels get a (K, N) view either way and read its strides.
"""

from __future__ import annotations

import torch

from minfer.ops import (
    DTYPES,
    TFLOPS,
    Case,
    Expected,
    Op,
    Spec,
    Tensors,
    at_most,
    both,
    compiled,
    floats,
    given,
    multiples,
    out,
    size,
    within,
)  # fmt: skip
from minfer.ops.bounds import ROUNDOFF


def tensors(case: Case) -> list[Spec]:
    """B is as large as 1 / sqrt(K), so that the bias weighs as much as the product."""
    m, n, k = case["m"], case["n"], case["k"]
    b = given("b", k, n, fill=floats(k**-0.5), order=(1, 0) if case.params["layout"] == "TN" else None)
    return [out("y", m, n), given("a", m, k), b, given("bias", n)]


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """The bound of a dot product of K + 1 terms, and one rounding of the product to the tensors' dtype before the bias, which
    PyTorch's definition has where it takes two kernels. ReLU enlarges no error."""
    unit, terms = torch.finfo(DTYPES[case.dtype]).eps / 2, 4 * (case["k"] + 1) ** 0.5 * ROUNDOFF["float32"]
    product = t["a"] @ t["b"]
    bound = (t["a"].abs() @ t["b"].abs()).add_(t["bias"].abs()).mul_(terms).add_(product.abs(), alpha=unit)
    return {"y": within(product.add_(t["bias"]).clamp_(min=0), bound)}


def eager(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The product with its bias, and then ReLU in place."""
    return torch.relu_(torch.addmm(bias, a, b))


def epilogue(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """cuBLASLt with its own epilogue, by a function that PyTorch has for its fused layers and does not document."""
    return torch._addmm_activation(bias, a, b)


def into(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> None:
    """The definition, for torch.compile to fuse what it can."""
    y.copy_(torch.relu(torch.addmm(bias, a, b)))


op = Op(
    "gemm_bias_relu",
    axes={"m": size(), "n": size(), "k": size()},
    params={"layout": ("TN", "NN")},
    tensors=tensors,
    reference=reference,
    flops=lambda case: 2.0 * case["m"] * case["n"] * case["k"],
    arithmetic=lambda case: (case.dtype, "float32"),
    metric=TFLOPS,
    strided=("y", "a", "b"),
    odd_shapes=({"m": 33, "n": 65, "k": 17}, {"m": 70, "n": 72, "k": 104}),
    sizes={
        "small": [
            {"m": 1, "n": 1, "k": 1},
            {"m": 7, "n": 40, "k": 72},
            {"m": 40, "n": 136, "k": 264},
            {"m": 9, "n": 24, "k": 8},
        ],
        "nan": [{"m": 64, "n": 128, "k": 64}, {"m": 8, "n": 64, "k": 128}],
        "large": [
            {"m": 1024, "n": 256, "k": 512},
            {"m": 257, "n": 384, "k": 1000},
            {"m": 2550, "n": 2552, "k": 1032},
        ],
    },
)

VECTORS = multiples(n=8, k=8)  # rows of 16-byte pieces

# For other sizes PyTorch rounds the product before it adds the bias, which cancellation shows.
op.torch("torch", eager, baseline=True, returns=(0,), requires=VECTORS)
op.torch("torch_cublaslt", epilogue, returns=(0,), requires=VECTORS)
op.torch("torch_compile", compiled(into), requires=VECTORS)
op.cuda("v01_naive.cu")
op.cuda("v02_mma.cu", requires=VECTORS)
op.cuda("v03_one_wave.cu", archs="sm_90a", requires=VECTORS, least_measured="n")
op.cuda("v04_cooperative.cu", archs="sm_90a", requires=VECTORS)
op.cuda("v05_fitted.cu", archs="sm_90a", requires=VECTORS, preferred="rows_of_a_prompt")
op.cuda("v06_anywhere.cu")
op.cuda("v07_strips.cu", archs="sm_90a", requires=both(VECTORS, at_most(m=128)), preferred="up_to_128_rows")
op.triton("triton_autotuned.py")
op.triton("triton_specialised.py", archs="sm_90+", requires=VECTORS)
op.cpp("cpu_naive.cpp")
op.function("gemm_bias_relu", lambda minfer, y, a, b, bias: minfer.gemm_bias_relu(a, b, bias), returns=(0,))
op.draws("first_product")
