"""layernorm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the rows of x (Ba, Kiros and Hinton, Layer
normalization, 2016).

x and y are (tokens, hidden), row-major, weight and bias are (hidden,), all of one dtype. The variance is the mean of squared
differences, and not a difference of means, which would lose all digits where the mean is large. Sums are fp32, and y is
rounded once.
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
    size,
    within,
)  # fmt: skip


def tensors(case: Case) -> list[Spec]:
    tokens, hidden = case["tokens"], case["hidden"]
    return [
        out("y", tokens, hidden),
        given("x", tokens, hidden, fill=floats(shift=8.0)),  # a large mean, whose square would hide the variance
        given("weight", hidden, fill=floats(0.1, shift=1.0)),
        given("bias", hidden),
    ]


def reference(case: Case, t: Tensors, eps: float) -> dict[str, Expected]:
    """The mean is a sum of `hidden` terms and has an error m of 4 sqrt(hidden) u mean |x|, and a difference x - mean one
    of m + u |x - mean|. The variance has a relative error of 4 sqrt(hidden) u, because its terms are positive, to which m
    adds m^2 only: an error common to all differences is orthogonal to them. The root halves it. Each further step adds a
    rounding. With one element a row the difference is zero, and eps alone bounds what m becomes."""
    u, terms = 2.0**-24, 4 * case["hidden"] ** 0.5
    mean = t["x"].mean(1, keepdim=True)
    apart = t["x"] - mean
    variance = apart.square().mean(1, keepdim=True)
    of_mean = terms * u * t["x"].abs().mean(1, keepdim=True)
    r = torch.rsqrt(variance + eps)
    scaled = apart * r * t["weight"]
    of_scale = (terms / 2 + 8) * u + of_mean.square() * r.square()
    error = (of_mean * r * t["weight"]).abs() + scaled.abs() * of_scale
    y = scaled + t["bias"]
    return {"y": within(y, error + 2 * u * (scaled.abs() + y.abs()))}


def eager(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """PyTorch's own."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def fused(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> None:
    """The definition, for torch.compile to fuse."""
    wide = x.float()
    apart = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(apart.square().mean(-1, keepdim=True) + eps)
    y.copy_((apart * scale * weight.float() + bias.float()).to(y.dtype))


def liger(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """https://linkedin.github.io/Liger-Kernel/Low-Level-APIs"""
    from liger_kernel.transformers.functional import liger_layer_norm

    return liger_layer_norm(x, weight, bias, eps)


op = Op(
    "layernorm",
    axes={"tokens": size(), "hidden": size(1024)},
    tensors=tensors,
    reference=reference,
    calls={"norm": {"eps": 1e-5}, "large_eps": {"eps": 0.5}},
    flops=lambda case: 7.0 * case["tokens"] * case["hidden"],
    arithmetic=lambda case: ("fma", "float32"),
    metric=GBPS,
    strided=("y", "x"),
    odd_shapes=({"tokens": 3, "hidden": 1000}, {"tokens": 1, "hidden": 77}),
    sizes={
        "small": [
            {"tokens": 1, "hidden": 8},
            {"tokens": 5, "hidden": 9},
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

ALL = ("float32", "float16", "bfloat16")
VECTORS = multiples(hidden=8)  # rows of 16-byte pieces


def fits(case: Case) -> str | None:
    """Why v03_any_width cannot take a row: a thread keeps at most 8 pieces, each of 16 bytes, or of one element where
    the length of a row is no multiple of 16 bytes."""
    vector = 16 // DTYPES[case.dtype].itemsize
    most = 4096 * (1 if case["hidden"] % vector else vector)
    return None if case["hidden"] <= most else f"needs hidden <= {most}"


op.torch("torch", eager, baseline=True, returns=(0,), dtypes=ALL)
op.torch("torch_compile", compiled(fused), dtypes=ALL)
op.peer("liger", liger, package="liger_kernel", returns=(0,), dtypes=ALL)
op.cuda("v01_naive.cu", dtypes=ALL)
op.cuda("v02_vectors.cu", dtypes=ALL, requires=VECTORS)
op.cuda("v03_any_width.cu", dtypes=ALL, requires=fits, preferred="long_rows")
op.triton("triton_rows.py", dtypes=ALL)
op.cpp("cpu_vectors.cpp", dtypes=ALL)
op.function(
    "layer_norm",
    lambda minfer, y, x, weight, bias, eps: minfer.layer_norm(x, weight, bias, eps),
    returns=(0,),
    dtypes=ALL,
)
op.draws("hidden_rows")
