"""sgemm: C = A @ B in single precision, with no tensor cores: fp32 products, fp32 sums.

A is (M, K), B is (K, N), C is (M, N), all row-major. TF32, which rounds the operands to 11 bits, is off, for PyTorch too.
"""

from __future__ import annotations

import torch

from minfer.ops import TFLOPS, Case, Expected, Op, Spec, Tensors, at_most, dot, given, multiples, out, size


def tensors(case: Case) -> list[Spec]:
    m, n, k = case["m"], case["n"], case["k"]
    return [out("out", m, n), given("a", m, k), given("b", k, n)]


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """The product, with the sum of magnitudes |A| |B|."""
    return {"out": dot(t["a"] @ t["b"], t["a"].abs() @ t["b"].abs(), case["k"])}


def torch_matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """cuBLAS (oneDNN on a CPU) through PyTorch, which must not use TF32 for this call."""
    backend = torch.backends.cuda.matmul
    before = backend.allow_tf32
    backend.allow_tf32 = False
    try:
        torch.mm(a, b, out=out)
    finally:
        backend.allow_tf32 = before


op = Op(
    "sgemm",
    axes={"m": size(), "n": size(), "k": size()},
    tensors=tensors,
    reference=reference,
    calls={"product": {}},
    flops=lambda case: 2.0 * case["m"] * case["n"] * case["k"],
    arithmetic=lambda case: ("fma", "float32"),
    metric=TFLOPS,
    strided=("out", "a", "b"),
    odd_shapes=({"m": 33, "n": 65, "k": 17}, {"m": 1, "n": 136, "k": 264}),
    sizes={
        "small": [
            {"m": 1, "n": 1, "k": 1},
            {"m": 7, "n": 600, "k": 300},
            {"m": 99, "n": 64, "k": 36},
            {"m": 100, "n": 64, "k": 520},
            {"m": 64, "n": 64, "k": 64},
            {"m": 257, "n": 384, "k": 200},
        ],
        "nan": [{"m": 64, "n": 128, "k": 64}, {"m": 8, "n": 128, "k": 1024}],
        "large": [{"m": 257, "n": 384, "k": 1000}, {"m": 1024, "n": 1024, "k": 1024}, {"m": 640, "n": 1000, "k": 516}],
    },
)

FP32 = ("float32",)

op.torch("torch", torch_matmul, baseline=True, dtypes=FP32)
op.cuda("v01_naive.cu", dtypes=FP32)
op.cuda("v02_tiled.cu", name="v02_tiled16", dtypes=FP32)
op.cuda("v02_tiled.cu", name="v02_tiled32", dtypes=FP32)
# Larger ones take seconds: 10^9 atomic additions at (1024, 1024, 1024).
op.cuda("v03_a_stationary.cu", dtypes=FP32, requires=at_most(m=1024, n=1024, k=1024), deterministic=False)
op.cuda("v04_batch_rule.cu", dtypes=FP32)
for rung in ("v05_register_tiles", "v06_deeper_tiles"):
    op.cuda("v05_register_tiles.cu", name=rung, dtypes=FP32, requires=multiples(n=4, k=4))
op.cpp("cpu_naive.cpp", dtypes=FP32)
op.cpp("cpu_blocked.cpp", dtypes=FP32)
