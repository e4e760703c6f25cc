"""Rows of bytes (fp8 e4m3 or int8) with one scale for each row: the results of ops that quantise.

The scale of a row is its largest magnitude divided by 448 (fp8) or by 127 (int8), and a byte is value / scale, rounded to the
nearest. A row of zeros has the scale 0 and bytes of zero. `quant_gemm` multiplies x by `x_scales` to get the values again.
"""

from __future__ import annotations

import torch

from minfer.ops.case import Case

Tensor = torch.Tensor
MOST = {"fp8": 448.0, "int8": 127.0}
STORED = {"fp8": "float8_e4m3fn", "int8": "int8"}
# By format: the error of a rounding to the nearest byte: a factor of the value, and an absolute part.
ROUNDING = {"fp8": (2.0**-4, 2.0**-10), "int8": (0.0, 0.5)}


def scales_of(values: Tensor, most: float) -> Tensor:
    return values.abs().amax(-1) / most


def quantise(values: Tensor, to: str) -> tuple[Tensor, Tensor]:
    """The bytes and the scales of rows, as a PyTorch user computes them."""
    wide = values.float()
    scales = scales_of(wide, MOST[to])
    kept = (wide / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).clamp(-MOST[to], MOST[to])
    return (kept.to(torch.float8_e4m3fn) if to == "fp8" else kept.round().to(torch.int8)), scales


def are_right(case: Case, y: Tensor, scales: Tensor, values: Tensor, errors: Tensor) -> Tensor:
    """Which bytes are values / scales, where values may be wrong by `errors`."""
    most = MOST[case.params["to"]]
    of_value, besides = ROUNDING[case.params["to"]]
    divisor = scales.double().clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    right = (values / divisor).clamp(-most, most)
    return (y.double() - right).abs() <= right.abs() * of_value + errors / divisor + besides * 1.001
