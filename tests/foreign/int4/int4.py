"""A product with 4-bit weights: y = x @ dequantised(w)^T, weight [n, k] being (nibble - 8) * scales[n, k // 32], and nibble k
of a row the low half of byte k // 2 where k is even, else the high one."""

from __future__ import annotations

import torch

from minfer.ops import (
    TFLOPS,
    Case,
    Expected,
    Op,
    Spec,
    Tensors,
    dot,
    floats,
    given,
    integers,
    multiple_of,
    out,
    size,
)

BLOCK = 32


def tensors(case: Case) -> list[Spec]:
    m, n, k = case["m"], case["n"], case["k"]
    return [
        out("y", m, n),
        given("x", m, k),
        given("w", n, k // 2, dtype="uint8", fill=integers(0, 256)),
        given("scales", n, k // BLOCK, dtype="float32", fill=floats(0.02, shift=0.1)),
    ]


def dequantised(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(n, k), of the scales' dtype."""
    nibbles = torch.stack([w & 15, w >> 4], -1).flatten(1).to(scales.dtype) - 8
    return nibbles * scales.repeat_interleave(BLOCK, 1)


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    weight = dequantised(t["w"], t["scales"])
    return {"y": dot(t["x"] @ weight.T, t["x"].abs() @ weight.T.abs(), case["k"])}


def eager(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantises to memory, and multiplies in fp32."""
    return (x.float() @ dequantised(w, scales).T).to(x.dtype)


op = Op(
    "foreign_int4",
    axes={"m": size(64), "n": size(), "k": multiple_of(BLOCK)},
    tensors=tensors,
    reference=reference,
    flops=lambda case: 2.0 * case["m"] * case["n"] * case["k"],
    arithmetic=lambda case: ("fma" if case.dtype == "float32" else case.dtype, "float32"),
    metric=TFLOPS,
    odd_shapes=({"m": 3, "n": 17, "k": 96}, {"m": 1, "n": 1, "k": 32}),
    sizes={"small": [{"m": 5, "n": 40, "k": 256}]},
)

ALL = ("float32", "float16", "bfloat16")
op.torch("torch", eager, baseline=True, returns=(0,), dtypes=ALL)
op.cpp("blocks.cpp", dtypes=ALL)
op.cuda("warps.cu", dtypes=ALL)
