"""silu_mul_quant: silu(gate) * up, the gate of a feed-forward layer, quantised by rows for the next product: y in fp8 e4m3 or
int8 (`params.to`), and a scale of each row (`minfer/ops/row_quant.py`).

gate and up are (tokens, hidden) of one dtype; their rows may lie apart, as those of the two halves of one projection do.
Arithmetic is fp32. A value may be rounded to its dtype before it is quantised, as when these are two kernels, or not.
"""

from __future__ import annotations

import torch

from minfer.ops import DTYPES, GBPS, Case, Expected, Op, Spec, Tensors, compiled, given, multiples, out, size, within
from minfer.ops.row_quant import MOST, STORED, are_right, quantise, scales_of

U = 2.0**-24
Tensor = torch.Tensor


def tensors(case: Case) -> list[Spec]:
    tokens, hidden = case["tokens"], case["hidden"]
    return [
        out("y", tokens, hidden, dtype=STORED[case.params["to"]]),
        out("scales", tokens, dtype="float32"),
        given("gate", tokens, hidden),
        given("up", tokens, hidden),
    ]


def gated(case: Case, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up, and by how much a value may be wrong: silu_mul's bound, and half an ulp of the dtype for silu and for
    the product, in the value and in the largest one. Half an ulp of float16 is at least half of its least subnormal number."""
    values = gate * gate.sigmoid() * up
    errors = values.abs() * ((16 + 2 * gate.abs()) * U + 2 * torch.finfo(DTYPES[case.dtype]).eps)
    if case.dtype == "float16":
        errors += (2.0**-25 * (1 + up.abs())).masked_fill_(values == 0, 0.0)
    return values, errors


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    values, errors = gated(case, t["gate"], t["up"])
    most = MOST[case.params["to"]]
    return {"scales": within(scales_of(values, most), scales_of(errors, most))}


def check_y(case: Case, t: Tensors) -> Tensor:
    return are_right(case, t["y"], t["scales"], *gated(case, t["gate"].double(), t["up"].double()))


def eager(y: Tensor, scales: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """What a PyTorch user writes, with new tensors."""
    return quantise(torch.nn.functional.silu(gate) * up, "int8" if y.dtype == torch.int8 else "fp8")


def fused(y: Tensor, scales: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, for torch.compile to fuse."""
    return quantise(torch.nn.functional.silu(gate.float()) * up.float(), "int8" if y.dtype == torch.int8 else "fp8")


op = Op(
    "silu_mul_quant",
    axes={"tokens": size(), "hidden": size(1024)},
    params={"to": ("fp8", "int8")},
    tensors=tensors,
    reference=reference,
    checks={"y": check_y},
    flops=lambda case: 7.0 * case["tokens"] * case["hidden"],
    arithmetic=lambda case: ("fma", "float32"),
    metric=GBPS,
    strided=("gate", "up"),
    odd_shapes=({"tokens": 3, "hidden": 1000}, {"tokens": 2, "hidden": 77}),
    sizes={
        "small": [{"tokens": 1, "hidden": 1}, {"tokens": 5, "hidden": 8}, {"tokens": 9, "hidden": 136}],
        "large": [{"tokens": 128, "hidden": 14336}, {"tokens": 2049, "hidden": 14336}, {"tokens": 7, "hidden": 53248}],
    },
)

ALL = ("float32", "float16", "bfloat16")

op.torch("torch", eager, baseline=True, returns=(0, 1), dtypes=ALL)
op.torch("torch_compile", compiled(fused), returns=(0, 1), dtypes=ALL)
op.cuda("v01_any_width.cu", dtypes=ALL)
op.cuda("v02_vectors.cu", dtypes=ALL, requires=multiples(hidden=8))
op.cpp("cpu_rows.cpp", dtypes=ALL)
op.function(
    "silu_mul_quant",
    lambda minfer, y, scales, gate, up: minfer.silu_mul_quant(gate, up, y.dtype),
    returns=(0, 1),
    dtypes=ALL,
)
op.draws("ffn_rows")
