"""rmsnorm: y = x / sqrt(mean(x^2) + eps) * weight over the rows of x (Zhang and Sennrich, Root mean square layer
normalization, NeurIPS 2019).

x and y are (tokens, hidden), row-major, weight is (hidden,), all of one dtype. Sums are fp32, and the result is rounded once:
unlike some models, it does not round the normalised row before the weight.
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
    multiples,
    out,
    rounded,
    size,
)  # fmt: skip


def tensors(case: Case) -> list[Spec]:
    tokens, hidden = case["tokens"], case["hidden"]
    return [out("y", tokens, hidden), given("x", tokens, hidden), given("weight", hidden, fill=floats(0.1, shift=1.0))]


def reference(case: Case, t: Tensors, eps: float) -> dict[str, Expected]:
    """The sum of squares has a relative error of at most 4 sqrt(hidden) u, because all terms are positive; the root halves
    it. Eight more roundings are for the mean, the root and the two products."""
    scale = torch.rsqrt(t["x"].square().mean(1, keepdim=True) + eps)
    return {"y": rounded(t["x"] * scale * t["weight"], 2 * case["hidden"] ** 0.5 + 8)}


def eager(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """PyTorch's own."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def fused(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    """The definition, for torch.compile to fuse."""
    wide = x.float()
    y.copy_((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(y.dtype))


def liger(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """https://linkedin.github.io/Liger-Kernel/Low-Level-APIs"""
    from liger_kernel.transformers.functional import liger_rms_norm

    return liger_rms_norm(x, weight, eps)


def quack(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """https://github.com/Dao-AILab/quack"""
    import quack

    return quack.rmsnorm(x, weight, eps=eps)


def flashinfer(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    """https://docs.flashinfer.ai/api/norm.html"""
    from flashinfer.norm import rmsnorm

    rmsnorm(x, weight, eps, out=y)


op = Op(
    "rmsnorm",
    axes={"tokens": size(), "hidden": size(1024)},
    tensors=tensors,
    reference=reference,
    calls={"norm": {"eps": 1e-6}, "large_eps": {"eps": 0.5}},
    flops=lambda case: 4.0 * case["tokens"] * case["hidden"],
    arithmetic=lambda case: ("fma", "float32"),
    metric=GBPS,
    strided=("y", "x"),
    odd_shapes=({"tokens": 3, "hidden": 1000}, {"tokens": 1, "hidden": 77}),
    sizes={
        "small": [
            {"tokens": 1, "hidden": 1},
            {"tokens": 5, "hidden": 8},
            {"tokens": 37, "hidden": 128},
            {"tokens": 130, "hidden": 136},
            {"tokens": 2, "hidden": 4096},
            {"tokens": 3, "hidden": 8200},
        ],
        "nan": [{"tokens": 64, "hidden": 128}, {"tokens": 8, "hidden": 4096}],
        "large": [
            {"tokens": 128, "hidden": 4096},
            {"tokens": 2049, "hidden": 4096},
            {"tokens": 300, "hidden": 16384},
            {"tokens": 7, "hidden": 65536},
        ],
    },
)

ALL, HALVES = ("float32", "float16", "bfloat16"), ("float16", "bfloat16")
VECTORS = multiples(hidden=8)  # rows of 16-byte pieces


def compiled_in(case: Case) -> str | None:
    """Whether v03_few_rows has a kernel for this row."""
    return None if case["hidden"] in (4096, 8192) else "needs hidden=4096 or 8192"


def short(case: Case) -> str | None:
    """Whether v04_short_rows has a group of lanes for this row."""
    row_bytes = case["hidden"] * DTYPES[case.dtype].itemsize
    return None if row_bytes in (16, 32, 64, 128, 256, 512) else "needs rows of 16, 32, 64, 128, 256 or 512 bytes"


op.torch("torch", eager, baseline=True, returns=(0,), dtypes=ALL)
op.torch("torch_compile", compiled(fused), dtypes=ALL)
op.peer("liger", liger, package="liger_kernel", returns=(0,), dtypes=ALL)
op.peer("quack", quack, package="quack", returns=(0,), dtypes=HALVES, requires=VECTORS)
op.peer("flashinfer", flashinfer, package="flashinfer", dtypes=HALVES, requires=VECTORS)
op.cuda("v01_naive.cu", dtypes=ALL)
op.cuda("v02_vectors.cu", dtypes=ALL, requires=VECTORS)
op.cuda("v03_few_rows.cu", dtypes=ALL, requires=compiled_in)
op.cuda("v04_short_rows.cu", dtypes=ALL, requires=short)
op.triton("triton_rows.py", dtypes=ALL)
op.cpp("cpu_naive.cpp", dtypes=ALL)
op.cpp("cpu_vectors.cpp", dtypes=ALL)
op.function("rms_norm", lambda minfer, y, x, weight, eps: minfer.rms_norm(x, weight, eps), returns=(0,), dtypes=ALL)
op.draws("head_or_hidden_rows")
