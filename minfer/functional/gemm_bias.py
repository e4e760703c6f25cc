"""`gemm_bias_relu` and `gemm_bias_gelu`: the kernels of both ops as functions of PyTorch, `torch.ops.minfer.<name>`."""

from __future__ import annotations

from typing import Any

import torch

from minfer.functional import library
from minfer.functional.best import NONE

# Not taken for fewer columns than any that were measured: there its N-slices leave SMs idle.
LEAST = {"v02_one_wave": "n", "v03_one_wave": "n"}  # of GELU and of ReLU
RELU, GELU = "gemm_bias_relu", "gemm_bias_gelu"


@library.public
def gemm_bias_relu(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """max(0, a b + bias), (M, N), of a (M, K), b (K, N) and bias (N,), all float16 or all bfloat16, on one device.

    Sums are fp32, and the result is rounded once. `weight.t()` of an `nn.Linear` is a b that is read in place. A tensor
    whose rows (of such a b: columns) do not start at multiples of 16 bytes is copied first. `best` picks the kernel, which is
    compiled at its first call. Works under `torch.compile`. It has no backward: raises RuntimeError where one would be
    recorded. Raises ValueError for tensors that do not fit each other."""
    library.refuse_gradients(RELU, a, b, bias)
    return _gemm_bias_relu_op(a, b, bias)


@library.public
def gemm_bias_gelu(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(a b + bias). All else is as for `gemm_bias_relu`. approximate is "none" (by the error function) or "tanh", as in
    PyTorch; raises ValueError for anything else."""
    library.refuse_gradients(GELU, a, b, bias)
    return _gemm_bias_gelu_op(a, b, bias, approximate)


def _relu(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = _fake(RELU, a, b, bias)
    return y.copy_(bias.relu()) if a.shape[1] == 0 else _call(RELU, y, a, b, bias)


def _gelu(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    y = _fake_gelu(a, b, bias, approximate)
    if a.shape[1] == 0:
        return y.copy_(torch.nn.functional.gelu(bias, approximate=approximate))
    tanh = approximate == "tanh"
    return _call(GELU, y, a, b, bias, {"call": "tanh"} if tanh else {}, tanh=tanh)


def _call(
    name: str, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, params: Any = NONE, **scalars: Any
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    if y.numel() == 0:
        return y
    a, bias = library.readable(a), library.readable(bias)
    if b.stride(0) == 1 and not (b.stride(1) == 1 and n == 1):
        b, layout = library.readable(b.t()).t(), "TN"
    else:
        b, layout = library.readable(b), "NN"
    shape = {"m": m, "n": n, "k": k}
    library.call(name, (y, a, b, bias), a.dtype, shape, {"layout": layout, **params}, LEAST, **scalars)
    return y


def _fake_gelu(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"minfer.gemm_bias_gelu takes approximate='none' or 'tanh', got {approximate!r}")
    return _fake(GELU, a, b, bias)


def _fake(name: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    def refuse(takes: str, got: object) -> ValueError:
        return ValueError(f"minfer.{name} takes {takes}, got {got}")

    if a.dtype not in (torch.float16, torch.bfloat16):
        raise refuse("a of float16 or bfloat16", a.dtype)
    for which, tensor in (("b", b), ("bias", bias)):
        if tensor.dtype != a.dtype:
            raise refuse(f"{which} of the dtype of a, {a.dtype}", tensor.dtype)
        if tensor.device != a.device:
            raise refuse(f"{which} on the device of a, {a.device}", tensor.device)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise refuse("a of (M, K) and b of (K, N)", f"{tuple(a.shape)} and {tuple(b.shape)}")
    if bias.dim() != 1 or bias.shape[0] != b.shape[1]:
        raise refuse(f"a bias of ({b.shape[1]},)", tuple(bias.shape))
    return a.new_empty(a.shape[0], b.shape[1])


_gemm_bias_relu_op = library.define(
    "gemm_bias_relu(Tensor a, Tensor b, Tensor bias) -> Tensor", _relu, lambda *given: _fake(RELU, *given)
)
_gemm_bias_gelu_op = library.define(
    'gemm_bias_gelu(Tensor a, Tensor b, Tensor bias, str approximate="none") -> Tensor', _gelu, _fake_gelu
)
