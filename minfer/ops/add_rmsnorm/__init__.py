"""add_rmsnorm: residual += x, and then y = residual / sqrt(mean(residual^2) + eps) * weight over its rows: what a decoder
runs behind each of its blocks (Zhang and Sennrich, Root mean square layer normalization, NeurIPS 2019).

y, residual and x are (tokens, hidden), row-major, weight is (hidden,), all of one dtype. The sum is rounded to it once, and y
is of the rounded sum, as if two kernels had done it. A kernel may use x as scratch: what it holds afterwards is undefined,
because some libraries write y there.
"""

from __future__ import annotations

import torch

from minfer.ops import (
    DTYPES,
    GBPS,
    Case,
    Expected,
    Op,
    Spec,
    Tensors,
    compiled,
    floats,
    given,
    inout,
    multiples,
    out,
    rounded,
    size,
    within,
)  # fmt: skip


def tensors(case: Case) -> list[Spec]:
    tokens, hidden = case["tokens"], case["hidden"]
    return [
        out("y", tokens, hidden),
        inout("residual", tokens, hidden),
        inout("x", tokens, hidden),
        given("weight", hidden, fill=floats(0.1, shift=1.0)),
    ]


def reference(case: Case, t: Tensors, eps: float) -> dict[str, Expected]:
    """As rmsnorm's. Besides, the sum may be rounded to its dtype before it is normalised, or not: half an ulp of the
    element, and as much of the root mean square at most."""
    total = t["residual"] + t["x"]
    scale = torch.rsqrt(total.square().mean(1, keepdim=True) + eps)
    y = total * scale * t["weight"]
    roundings = 2 * case["hidden"] ** 0.5 + 8
    of_sum = torch.finfo(DTYPES[case.dtype]).eps * y.abs() + torch.finfo(DTYPES[case.dtype]).smallest_normal * scale
    return {"residual": rounded(total, 1), "y": within(y, of_sum + y.abs() * roundings * 2.0**-24)}


def anything(case: Case, t: Tensors) -> torch.Tensor:
    """Of x afterwards."""
    return torch.ones_like(t["x"], dtype=torch.bool)


def traffic(case: Case) -> tuple[float, float]:
    """Two rows and the weight are read, two rows written; x need not be."""
    item, elements = DTYPES[case.dtype].itemsize, case["tokens"] * case["hidden"]
    return float((2 * elements + case["hidden"]) * item), float(2 * elements * item)


def eager(
    y: torch.Tensor, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """PyTorch's own, in two steps."""
    residual += x
    return torch.nn.functional.rms_norm(residual, weight.shape, weight, eps)


def fused(
    y: torch.Tensor, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, for torch.compile to fuse."""
    total = residual + x
    wide = total.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(y.dtype), total


def flashinfer(
    y: torch.Tensor, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """https://docs.flashinfer.ai/generated/flashinfer.norm.fused_add_rmsnorm.html: y in the place of x."""
    from flashinfer.norm import fused_add_rmsnorm

    fused_add_rmsnorm(x, residual, weight, eps)
    return x


def liger(
    y: torch.Tensor, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """https://linkedin.github.io/Liger-Kernel: both results are new tensors."""
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    normed, total = liger_fused_add_rms_norm(x, residual, weight, eps)
    return normed, total


def quack(
    y: torch.Tensor, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """https://github.com/Dao-AILab/quack: both results are new tensors."""
    import quack

    normed, total = quack.rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)
    return normed, total


op = Op(
    "add_rmsnorm",
    axes={"tokens": size(), "hidden": size(1024)},
    tensors=tensors,
    reference=reference,
    checks={"x": anything},
    calls={"norm": {"eps": 1e-6}, "large_eps": {"eps": 0.5}},
    flops=lambda case: 5.0 * case["tokens"] * case["hidden"],
    traffic=traffic,
    arithmetic=lambda case: ("fma", "float32"),
    metric=GBPS,
    strided=("y", "residual", "x"),
    odd_shapes=({"tokens": 3, "hidden": 1000}, {"tokens": 1, "hidden": 77}),
    sizes={
        "small": [
            {"tokens": 1, "hidden": 1},
            {"tokens": 5, "hidden": 8},
            {"tokens": 130, "hidden": 136},
            {"tokens": 2, "hidden": 4096},
            {"tokens": 3, "hidden": 8200},
        ],
        "nan": [{"tokens": 64, "hidden": 128}, {"tokens": 8, "hidden": 4096}],
        "large": [
            {"tokens": 128, "hidden": 4096},
            {"tokens": 2049, "hidden": 4096},
            {"tokens": 300, "hidden": 16384},
            {"tokens": 7, "hidden": 32768},
        ],
    },
)

ALL, HALVES = ("float32", "float16", "bfloat16"), ("float16", "bfloat16")
VECTORS = multiples(hidden=8)  # rows of 16-byte pieces


op.torch("torch", eager, baseline=True, returns=(0,), dtypes=ALL)
op.torch("torch_compile", compiled(fused), returns=(0, 1), dtypes=ALL)
op.peer("flashinfer", flashinfer, package="flashinfer", returns=(0,), dtypes=HALVES, requires=VECTORS)
op.peer("liger", liger, package="liger_kernel", returns=(0, 1), dtypes=ALL)
op.peer("quack", quack, package="quack", returns=(0, 1), dtypes=HALVES, requires=VECTORS)
op.cuda("v01_naive.cu", dtypes=ALL)
op.cuda("v02_vectors.cu", dtypes=ALL, requires=VECTORS)
op.cuda(
    "v03_early.cu",
    archs="sm_90a",
    dtypes=ALL,
    requires=lambda case: VECTORS(case) or ("takes hidden up to 16384" if case["hidden"] > 16384 else None),
    early=True,
)
op.triton("triton_rows.py", dtypes=ALL)
op.cpp("cpu_vectors.cpp", dtypes=ALL)
