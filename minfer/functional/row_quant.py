"""`silu_mul_quant` and `rms_norm_quant`: kernels that quantise their result by rows as functions of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minfer.functional import library
from minfer.functional.contract import Contract
from minfer.functional.norms import X, rows_of

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
STORED = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}


def _contracts(function: str, tensors: str) -> dict[torch.dtype, Contract]:
    """By the dtype of the result."""
    return {
        dtype: Contract(function, f"{tensors}\n-> {str(dtype).removeprefix('torch.')} (..., hidden)\n-> float32 (...)")
        for dtype in STORED
    }


SILU_MUL = _contracts("silu_mul_quant", "gate: float32 | float16 | bfloat16 (..., hidden)\nup: gate (..., hidden)")
RMS_NORM = _contracts("rms_norm_quant", f"{X}\nweight: x (hidden)")
ADD_RMS_NORM = _contracts("rms_norm_quant", f"{X}\nresidual: x (..., hidden)\nweight: x (hidden)")


@library.public
def silu_mul_quant(gate: Tensor, up: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Pair:
    """silu(gate) * up, quantised by rows. Returns y, of `dtype` and gate's shape, and float32 scales (...), one for each row.

    dtype: float8_e4m3fn or int8. A row's scale is its largest magnitude / 448 (fp8) or / 127 (int8); y is value / scale,
        rounded to the nearest. A row of zeros has the scale 0. `quant_gemm` takes y in float8_e4m3fn as x, and the scales as
        `x_scales`.
    gate, up: (..., hidden) of one shape, float32, float16 or bfloat16. They may be the halves of one projection,
        `projection.chunk(2, -1)`, which are read in place; what a kernel cannot read is copied first.

    Arithmetic is fp32 and each value is rounded once. `best` picks the kernel, which is compiled at its first call. Works under
    `torch.compile`. It has no backward: raises RuntimeError where one would be recorded. Raises ValueError for arguments that
    do not fit."""
    library.refuse_gradients("silu_mul_quant", gate, up)
    y, scales = _silu_mul_quant_op(gate, up, dtype)
    return y, scales


@library.public
def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Pair:
    """`rms_norm`, quantised by rows. Returns y, of `dtype` and x's shape, and float32 scales (...) as in `silu_mul_quant`.

    x is (..., hidden), weight (hidden,), both float32, float16 or bfloat16. With a `residual` of x's shape, x is added to it in
    place, and the sum is normalised. Arithmetic is fp32, and a normalised value is rounded once, to its byte. `best`
    picks the kernel, which is compiled at its first call. Works under `torch.compile`. It has no backward: raises RuntimeError
    where one would be recorded. Raises ValueError for arguments that do not fit."""
    library.refuse_gradients("rms_norm_quant", x, weight, residual)
    if residual is None:
        y, scales = _rms_norm_quant_op(x, weight, eps, dtype)
    else:
        y, scales = _add_rms_norm_quant_op(x, residual, weight, eps, dtype)
    return y, scales


def _make(contracts: Mapping[torch.dtype, Contract], dtype: torch.dtype, *given: Tensor) -> Pair:
    """Empty bytes and scales. Raises ValueError for arguments that do not fit."""
    if dtype not in contracts:
        raise contracts[torch.int8].error("a dtype of float8_e4m3fn or int8", dtype)
    made: Pair = contracts[dtype].make(*given)
    return made


def _fake_silu_mul(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Pair:
    return _make(SILU_MUL, dtype, gate, up)


def _silu_mul(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Pair:
    y, scales = _fake_silu_mul(gate, up, dtype)
    if not y.numel():
        return y, scales.zero_()
    rows = rows_of(gate)
    tensors = (y.view(rows.shape), scales.view(-1), rows, rows_of(up))
    shape = {"tokens": rows.shape[0], "hidden": rows.shape[1]}
    library.call("silu_mul_quant", tensors, gate.dtype, shape, {"to": STORED[dtype]})
    return y, scales


def _fake_rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Pair:
    return _make(RMS_NORM, dtype, x, weight)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Pair:
    made = _fake_rms_norm(x, weight, eps, dtype)
    rows = x.new_empty(0, x.shape[-1])
    return _call_norm(made, rows, x, weight, eps, dtype)


def _fake_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Pair:
    return _make(ADD_RMS_NORM, dtype, x, residual, weight)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Pair:
    made = _fake_add_rms_norm(x, residual, weight, eps, dtype)
    total = rows_of(residual) if x.numel() else residual
    found = _call_norm(made, total, x, weight, eps, dtype)
    if x.numel() and total.data_ptr() != residual.data_ptr():  # a copy, because kernels cannot read the rows in place
        residual.copy_(total.view(residual.shape))
    return found


def _call_norm(made: Pair, residual: Tensor, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Pair:
    y, scales = made
    if not y.numel():
        return y, scales.zero_()
    rows = rows_of(x)
    tensors = (y.view(rows.shape), scales.view(-1), residual, rows, library.readable(weight))
    shape = {"tokens": rows.shape[0], "hidden": rows.shape[1]}
    params = {"to": STORED[dtype], "residual": "added" if len(residual) else "none"}
    library.call("add_rmsnorm_quant", tensors, x.dtype, shape, params, eps=eps)
    return y, scales


_silu_mul_quant_op = library.define(
    "silu_mul_quant(Tensor gate, Tensor up, ScalarType dtype) -> (Tensor, Tensor)", _silu_mul, _fake_silu_mul
)
_rms_norm_quant_op = library.define(
    "rms_norm_quant(Tensor x, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    _rms_norm,
    _fake_rms_norm,
)
_add_rms_norm_quant_op = library.define(
    "add_rms_norm_quant(Tensor x, Tensor(a!) residual, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    _add_rms_norm,
    _fake_add_rms_norm,
)
