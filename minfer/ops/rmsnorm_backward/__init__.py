"""rmsnorm_backward: the gradients of rmsnorm, y = x r weight with r = 1 / sqrt(mean(x^2) + eps) for each row of x.

With g = dy weight and the mean over a row:

    dx = r (g - x r^2 mean(g x))        dweight = the sum of dy x r over all rows

dx, dy and x are (tokens, hidden), row-major, dweight and weight are (hidden,), all of one dtype; sums are fp32, and dx and
dweight are rounded once. The parameter `rstd` says whether the forward pass has saved r: (tokens,), fp32, as PyTorch's own
does; or empty, and a kernel computes it from x, which it reads anyway.
"""

from __future__ import annotations

import torch

from minfer.ops import (
    DTYPES,
    GBPS,
    Case,
    Draw,
    Expected,
    Op,
    Spec,
    Tensors,
    at_most,
    both,
    compiled,
    floats,
    given,
    made_by,
    multiples,
    out,
    size,
    within,
)  # fmt: skip

EPS = 1e-6  # of the saved r


def saved(made: Tensors, draw: Draw, device: torch.device) -> torch.Tensor:
    """What the forward pass leaves."""
    return torch.rsqrt(made["x"].float().square().mean(1) + EPS)


def tensors(case: Case) -> list[Spec]:
    tokens, hidden = case["tokens"], case["hidden"]
    kept = given("rstd", tokens, dtype="float32", fill=made_by(saved))
    return [
        out("dx", tokens, hidden),
        out("dweight", hidden),
        given("dy", tokens, hidden),
        given("x", tokens, hidden),
        given("weight", hidden, fill=floats(0.1, shift=1.0)),
        kept if case.params["rstd"] == "saved" else given("rstd", 0, dtype="float32"),
    ]


def reference(case: Case, t: Tensors, eps: float) -> dict[str, Expected]:
    """r has the error of rmsnorm's, the mean in dx that of a dot product of `hidden` terms, dweight that of one of `tokens`;
    each factor adds a rounding."""
    tokens, hidden = case["tokens"], case["hidden"]
    mean = t["x"].square().mean(1, keepdim=True)
    r = t["rstd"][:, None] if t["rstd"].numel() else torch.rsqrt(mean + eps)
    g = t["dy"] * t["weight"]
    normed = t["x"] * r
    common = (g * normed).mean(1, keepdim=True)
    magnitude = (g * normed).abs().mean(1, keepdim=True)
    dx = r * (g - normed * common)
    of_r, u = 2 * hidden**0.5 + 8, 2.0**-24
    error = r * (g.abs() * (of_r + 4) + normed.abs() * magnitude * (3 * of_r + 4 * hidden**0.5 + 8)) * u
    terms = t["dy"] * normed
    dweight = within(terms.sum(0), terms.abs().sum(0) * (of_r + 4 * tokens**0.5 + 4) * u)
    return {"dx": within(dx, error), "dweight": dweight}


def eager(
    dx: torch.Tensor,
    dweight: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    eps: float = EPS,
) -> tuple[torch.Tensor, ...]:
    """What autograd calls for `F.rms_norm`."""
    kept = rstd if rstd.numel() else torch.rsqrt(x.float().square().mean(1) + eps)
    if x.is_cuda:
        both_wanted = [True, True]
        return torch.ops.aten._fused_rms_norm_backward(dy, x, weight.shape, kept[:, None], weight, both_wanted)
    return gradients(dy, x, weight, kept)


def gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, of tensors of any width: sums are of fp32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = x.to(wide) * rstd[:, None]
    g = dy.to(wide) * weight.to(wide)
    dx = rstd[:, None] * (g - normed * (g * normed).mean(1, keepdim=True))
    return dx.to(x.dtype), (dy.to(wide) * normed).sum(0).to(weight.dtype)


def fused(
    dx: torch.Tensor,
    dweight: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    eps: float = EPS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, for torch.compile to fuse."""
    kept = rstd if rstd.numel() else torch.rsqrt(x.float().square().mean(1) + eps)
    return gradients(dy, x, weight, kept)


def liger(
    dx: torch.Tensor,
    dweight: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    eps: float = EPS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What Liger's autograd function calls, with everything in fp32 (its casting mode "gemma") and dx in a new tensor, because
    dy must stay as it is."""
    from liger_kernel.ops.rms_norm import rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    gemma, settings = 1, calculate_settings(x.shape[1])
    found = rms_norm_backward(dy, x, weight, rstd, 0.0, gemma, *settings, in_place=False, row_mode=None)
    return found[0], found[1]


op = Op(
    "rmsnorm_backward",
    axes={"tokens": size(), "hidden": size(1024)},
    tensors=tensors,
    reference=reference,
    params={"rstd": ("saved", "recomputed")},
    calls={"gradients": {"eps": EPS}},
    flops=lambda case: 11.0 * case["tokens"] * case["hidden"],
    arithmetic=lambda case: ("fma", "float32"),
    metric=GBPS,
    strided=("dx", "dy", "x"),
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
            {"tokens": 5000, "hidden": 128},
        ],
    },
)

ALL = ("float32", "float16", "bfloat16")
MOST_BYTES = 32768  # of a row that 512 threads keep in registers, beside their sums


def short(case: Case) -> str | None:
    """Whether the registers of a block have a row."""
    most = MOST_BYTES // DTYPES[case.dtype].itemsize
    return None if case["hidden"] <= most else f"needs hidden <= {most}"


op.torch("torch", eager, baseline=True, returns=(0, 1), dtypes=ALL)
op.torch("torch_compile", compiled(fused), returns=(0, 1), dtypes=ALL)
op.peer(
    "liger",
    liger,
    package="liger_kernel",
    returns=(0, 1),
    dtypes=ALL,
    params={"rstd": ("saved",)},
    requires=at_most(hidden=65536),
)
op.cuda("v01_naive.cu", dtypes=ALL)
op.cuda("v02_two_stages.cu", dtypes=ALL, requires=both(multiples(hidden=8), short))
op.triton("triton_two_stages.py", dtypes=ALL, requires=at_most(hidden=16384))
op.cpp("cpu_naive.cpp", dtypes=ALL)
