"""axpby: y = alpha a + beta b, element by element, in float32: the smallest example of why kernels are fused.

y, a and b are (n,). Unlike the beta of a BLAS, a beta of 0 does not hide a NaN of b.
"""

from __future__ import annotations

import torch

from minfer.ops import GBPS, Case, Expected, Op, Spec, Tensors, compiled, given, multiples, out, size, within

U = 2.0**-24


def tensors(case: Case) -> list[Spec]:
    return [out("y", case["n"]), given("a", case["n"]), given("b", case["n"])]


def reference(case: Case, t: Tensors, alpha: float, beta: float) -> dict[str, Expected]:
    """Two products and a sum, each rounded once, with factors that were rounded to fp32: at most 3 u of both products'
    magnitudes, whether or not a product and the sum are one instruction."""
    first, second = alpha * t["a"], beta * t["b"]
    return {"y": within(first + second, (first.abs() + second.abs()) * (3 * U))}


def eager(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, beta: float = 1.0) -> torch.Tensor:
    """In two steps, each a kernel: the first product goes to memory and back."""
    return torch.add(a * alpha, b, alpha=beta)


def fused(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, beta: float = 1.0) -> None:
    """The definition, for torch.compile to fuse."""
    y.copy_(a * alpha + b * beta)


op = Op(
    "axpby",
    axes={"n": size(4096)},
    tensors=tensors,
    reference=reference,
    calls={"mix": {"alpha": 0.75, "beta": -1.5}, "sum": {"alpha": 1.0, "beta": 1.0}},
    flops=lambda case: 3.0 * case["n"],
    arithmetic=lambda case: ("fma", "float32"),
    metric=GBPS,
    odd_shapes=({"n": 1000}, {"n": 77}),
    sizes={
        "small": [{"n": 1}, {"n": 8}, {"n": 1032}, {"n": 4100}, {"n": 20000}, {"n": 65544}, {"n": 3}],
        "large": [{"n": 1 << 20}, {"n": (1 << 22) + 4}, {"n": 33554433}],
    },
)

FP32 = ("float32",)


op.torch("torch", eager, baseline=True, returns=(0,), dtypes=FP32)
op.torch("torch_compile", compiled(fused), dtypes=FP32)
op.cuda("v01_naive.cu", dtypes=FP32)
op.cuda("v02_vectors.cu", dtypes=FP32, requires=multiples(n=4))
op.triton("triton_blocks.py", dtypes=FP32)
op.cpp("cpu_loop.cpp", dtypes=FP32)
