"""add_rmsnorm_quant: what a decoder runs behind each of its blocks, quantised for the next product: residual += x, and then
residual / sqrt(mean(residual^2) + eps) * weight over its rows (Zhang and Sennrich, Root mean square layer normalization,
NeurIPS 2019), as y in fp8 e4m3 or int8 (`params.to`) with a scale of each row (`minfer/ops/row_quant.py`).

residual and x are (tokens, hidden), weight is (hidden,), all of one dtype. The sum is rounded to it once, and y is of the
rounded sum. A normalised value is fp32 and rounded once, to its byte. The largest values of all rows are alike after a norm: a
bound that allowed a rounding to a half type would not tell their scales apart.
Without a residual (`params.residual` is none) it is empty, and x is normalised.
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
    floats,
    given,
    inout,
    multiples,
    out,
    rounded,
    size,
    within,
)  # fmt: skip
from minfer.ops.row_quant import MOST, STORED, are_right, quantise, scales_of

Tensor = torch.Tensor


def tensors(case: Case) -> list[Spec]:
    tokens, hidden = case["tokens"], case["hidden"]
    return [
        out("y", tokens, hidden, dtype=STORED[case.params["to"]]),
        out("scales", tokens, dtype="float32"),
        inout("residual", tokens if case.params["residual"] == "added" else 0, hidden),
        given("x", tokens, hidden),
        given("weight", hidden, fill=floats(0.1, shift=1.0)),
    ]


def relative(case: Case) -> float:
    """Of a normalised value: rmsnorm's bound, twice, because the largest value has it, too."""
    return 2 * (2 * case["hidden"] ** 0.5 + 8) * 2.0**-24


def normalised(total: Tensor, weight: Tensor, eps: float) -> Tensor:
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight


def reference(case: Case, t: Tensors, eps: float) -> dict[str, Expected]:
    added = t["residual"] + t["x"] if case.params["residual"] == "added" else t["residual"]
    total = added.to(DTYPES[case.dtype]).double() if case.params["residual"] == "added" else t["x"]
    scales = scales_of(normalised(total, t["weight"], eps), MOST[case.params["to"]])
    return {"scales": within(scales, scales * relative(case)), "residual": rounded(added, 1)}


def check_y(case: Case, t: Tensors) -> Tensor:
    total = (t["residual"] if case.params["residual"] == "added" else t["x"]).double()
    values = normalised(total, t["weight"].double(), float(op.call(case)["eps"]))
    return are_right(case, t["y"], t["scales"], values, values.abs() * relative(case))


def eager(
    y: Tensor, scales: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """PyTorch's own, step by step."""
    total = residual.add_(x) if len(residual) else x
    found = torch.nn.functional.rms_norm(total.float(), weight.shape, weight.float(), eps)
    return quantise(found, "int8" if y.dtype == torch.int8 else "fp8")


op = Op(
    "add_rmsnorm_quant",
    axes={"tokens": size(), "hidden": size(1024)},
    params={"to": ("fp8", "int8"), "residual": ("added", "none")},
    tensors=tensors,
    reference=reference,
    checks={"y": check_y},
    calls={"norm": {"eps": 1e-6}, "large_eps": {"eps": 0.5}},
    flops=lambda case: 7.0 * case["tokens"] * case["hidden"],
    arithmetic=lambda case: ("fma", "float32"),
    metric=GBPS,
    strided=("residual", "x"),
    odd_shapes=({"tokens": 3, "hidden": 1000}, {"tokens": 2, "hidden": 77}),
    sizes={
        "small": [{"tokens": 1, "hidden": 1}, {"tokens": 5, "hidden": 8}, {"tokens": 9, "hidden": 136}],
        "large": [{"tokens": 128, "hidden": 4096}, {"tokens": 2049, "hidden": 4096}, {"tokens": 7, "hidden": 53248}],
    },
)

ALL = ("float32", "float16", "bfloat16")

op.torch("torch", eager, baseline=True, returns=(0, 1), dtypes=ALL)
op.cuda("v01_any_width.cu", dtypes=ALL)
op.cuda("v02_vectors.cu", dtypes=ALL, requires=multiples(hidden=8))
op.cpp("cpu_rows.cpp", dtypes=ALL)
op.function(
    "rms_norm_quant",
    lambda minfer, y, scales, residual, x, weight, eps: minfer.rms_norm_quant(
        x, weight, eps, residual if len(residual) else None, dtype=y.dtype
    ),
    returns=(0, 1),
    dtypes=ALL,
)
op.draws("hidden_rows")
