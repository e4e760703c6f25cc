"""`rms_norm` and `layer_norm`: the kernels of rmsnorm, add_rmsnorm, rmsnorm_backward and layernorm as functions of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from minfer.functional import library

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@library.public
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019), a new tensor of x's shape.

    x is (..., hidden), weight (hidden,), both float32, float16 or bfloat16, on one device; sums are fp32. With a `residual`
    of x's shape, x is added to it in place, and the sum is what is normalised. `best` picks the kernels, which are compiled
    at their first call. Works under `torch.compile`. It has a backward unless there is a residual: then it raises
    RuntimeError where one would be recorded. Raises ValueError for tensors that do not fit each other."""
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


def _check(name: str, x: torch.Tensor, **others: torch.Tensor) -> None:
    """Raises ValueError unless x has rows of a dtype that kernels know, and the others fit it: those called `residual` and
    `dy` have x's shape, the others the shape of its last dimension."""
    if x.dtype not in DTYPES:
        raise ValueError(f"minfer.{name} takes an x of float32, float16 or bfloat16, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError(f"minfer.{name} takes an x of at least one dimension, got a scalar")
    for which, tensor in others.items():
        wanted = x.shape if which in ("residual", "dy") else x.shape[-1:]
        if tensor.shape != wanted:
            raise ValueError(
                f"minfer.{name} takes a {which} of the shape {tuple(wanted)} for this x, got {tuple(tensor.shape)}"
            )
        if tensor.dtype != x.dtype:
            raise ValueError(f"minfer.{name} takes a {which} of x's dtype {x.dtype}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"minfer.{name} takes a {which} on x's device {x.device}, got {tensor.device}")


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix of its rows, which kernels can read."""
    return library.readable(tensor.reshape(-1, tensor.shape[-1]))


def _sizes(rows: torch.Tensor) -> dict[str, int]:
    return {"tokens": rows.shape[0], "hidden": rows.shape[1]}


def _fresh(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# rms_norm


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = _rms_norm_fake(x, weight, eps)
    if y.numel():
        rows = rows_of(x)
        tensors = (y.view(rows.shape), rows, library.readable(weight))
        library.call("rmsnorm", tensors, x.dtype, _sizes(rows), eps=eps)
    return y


def _rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    _check("rms_norm", x, weight=weight)
    return _fresh(x)


def _backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dweight = _backward_fake(dy, x, weight, eps)
    if not x.numel():
        return dx, dweight.zero_()
    rows, rstd = rows_of(x), torch.empty(0, dtype=torch.float32, device=x.device)
    tensors = (dx.view(rows.shape), dweight, rows_of(dy), rows, library.readable(weight), rstd)
    library.call("rmsnorm_backward", tensors, x.dtype, _sizes(rows), {"rstd": "recomputed"}, eps=eps)
    return dx, dweight


def _backward_fake(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _check("rms_norm", x, weight=weight, dy=dy)
    return _fresh(x), _fresh(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight = ctx.saved_tensors
    return *torch.ops.minfer.rms_norm_backward.default(dy, x, weight, ctx.eps), None


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = _add_rms_norm_fake(x, residual, weight, eps)
    if not y.numel():
        return y
    rows, total = rows_of(x), rows_of(residual)
    # x is only read: no kernel of ours uses it as scratch.
    tensors = (y.view(rows.shape), total, rows, library.readable(weight))
    library.call("add_rmsnorm", tensors, x.dtype, _sizes(rows), eps=eps)
    if total.data_ptr() != residual.data_ptr():  # `total` is a copy, because kernels cannot read the rows in place
        residual.copy_(total.view(residual.shape))
    return y


def _add_rms_norm_fake(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    _check("rms_norm", x, residual=residual, weight=weight)
    return _fresh(x)


# layer_norm


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    y = _layer_norm_fake(x, weight, bias, eps)
    if y.numel():
        rows = rows_of(x)
        tensors = (y.view(rows.shape), rows, library.readable(weight), library.readable(bias))
        library.call("layernorm", tensors, x.dtype, _sizes(rows), eps=eps)
    return y


def _layer_norm_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    _check("layer_norm", x, weight=weight, bias=bias)
    return _fresh(x)


_rms_norm_op = library.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, _rms_norm_fake)
library.define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _backward, _backward_fake
)
_add_rms_norm_op = library.define(
    "add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor",
    _add_rms_norm,
    _add_rms_norm_fake,
)
_layer_norm_op = library.define(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor", _layer_norm, _layer_norm_fake
)
torch.library.register_autograd("minfer::rms_norm", _gradients, setup_context=_save, lib=library.LIBRARY)
