"""`rms_norm` and `layer_norm`: the kernels of rmsnorm, add_rmsnorm, rmsnorm_backward and layernorm as functions of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from minfer.functional import library
from minfer.functional.contract import Contract

X = "x: float32 | float16 | bfloat16 (..., hidden)"
RMS_NORM = Contract("rms_norm", f"{X}\nweight: x (hidden)\n-> x (..., hidden)")
BACKWARD = Contract("rms_norm", f"{X}\nweight: x (hidden)\ndy: x (..., hidden)\n-> x (..., hidden)\n-> x (hidden)")
ADD_RMS_NORM = Contract("rms_norm", f"{X}\nresidual: x (..., hidden)\nweight: x (hidden)\n-> x (..., hidden)")
LAYER_NORM = Contract("layer_norm", f"{X}\nweight: x (hidden)\nbias: x (hidden)\n-> x (..., hidden)")


@library.public
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019), a new tensor of x's shape.

    x is (..., hidden), weight (hidden,), both float32, float16 or bfloat16, on one device; sums are fp32. With a `residual`
    of x's shape, x is added to it in place, and the sum is what is normalised. `best` picks the kernels, which are compiled
    at their first call. Works under `torch.compile`. It has a backward, without second derivatives: these raise RuntimeError.
    With a residual it has none, and raises RuntimeError where one would be recorded. Raises ValueError for tensors that do
    not fit each other."""
    if residual is None:
        return _rms_norm_op(x, weight, eps)
    library.refuse_gradients("rms_norm with a residual", x, weight, residual)
    return _add_rms_norm_op(x, residual, weight, eps)


@library.public
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension (Ba, Kiros and Hinton, 2016), a new tensor.

    x is (..., hidden), weight and bias are (hidden,), all float32, float16 or bfloat16, on one device; sums are fp32.
    `best` picks the kernel, which is compiled at its first call. Works under `torch.compile`. It has no backward: raises
    RuntimeError where one would be recorded. Raises ValueError for tensors that do not fit each other."""
    library.refuse_gradients("layer_norm", x, weight, bias)
    return _layer_norm_op(x, weight, bias, eps)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix of its rows, which kernels can read."""
    return library.readable(tensor.reshape(-1, tensor.shape[-1]))


def _sizes(rows: torch.Tensor) -> dict[str, int]:
    return {"tokens": rows.shape[0], "hidden": rows.shape[1]}


# rms_norm


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y: torch.Tensor = RMS_NORM.make(x, weight)
    if y.numel():
        rows = rows_of(x)
        tensors = (y.view(rows.shape), rows, library.readable(weight))
        library.call("rmsnorm", tensors, x.dtype, _sizes(rows), eps=eps)
    return y


def _backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dweight = BACKWARD.make(x, weight, dy)
    if not x.numel():
        return dx, dweight.zero_()
    rows, rstd = rows_of(x), torch.empty(0, dtype=torch.float32, device=x.device)
    tensors = (dx.view(rows.shape), dweight, rows_of(dy), rows, library.readable(weight), rstd)
    library.call("rmsnorm_backward", tensors, x.dtype, _sizes(rows), {"rstd": "recomputed"}, eps=eps)
    return dx, dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight = ctx.saved_tensors
    return *torch.ops.minfer.rms_norm_backward.default(dy, x, weight, ctx.eps), None


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y: torch.Tensor = ADD_RMS_NORM.make(x, residual, weight)
    if not y.numel():
        return y
    rows, total = rows_of(x), rows_of(residual)
    # x is only read: no kernel of ours uses it as scratch.
    tensors = (y.view(rows.shape), total, rows, library.readable(weight))
    library.call("add_rmsnorm", tensors, x.dtype, _sizes(rows), eps=eps)
    if total.data_ptr() != residual.data_ptr():  # `total` is a copy, because kernels cannot read the rows in place
        residual.copy_(total.view(residual.shape))
    return y


# layer_norm


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    y: torch.Tensor = LAYER_NORM.make(x, weight, bias)
    if y.numel():
        rows = rows_of(x)
        tensors = (y.view(rows.shape), rows, library.readable(weight), library.readable(bias))
        library.call("layernorm", tensors, x.dtype, _sizes(rows), eps=eps)
    return y


_rms_norm_op = library.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, RMS_NORM.make)
library.define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _backward,
    lambda dy, x, weight, eps: BACKWARD.make(x, weight, dy),
)
_add_rms_norm_op = library.define(
    "add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor",
    _add_rms_norm,
    ADD_RMS_NORM.make,
)
_layer_norm_op = library.define(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor", _layer_norm, LAYER_NORM.make
)
torch.library.register_autograd("minfer::rms_norm", _gradients, setup_context=_save, lib=library.LIBRARY)
library.refuse_second_derivatives("rms_norm")
