"""`gemm_bias_relu` and `gemm_bias_gelu`: the kernels of both ops as functions of PyTorch, `torch.ops.minfer.<name>`."""

from __future__ import annotations

from typing import Any

import torch

from minfer.functional import library
from minfer.functional.best import NONE
from minfer.functional.contract import Contract

RELU, GELU = "gemm_bias_relu", "gemm_bias_gelu"
TAKES = {
    name: Contract(
        name,
        """
        a: float16 | bfloat16 (m, k)
        b: a (k, n)
        bias: a (n)
        -> a (m, n)
        """,
    )
    for name in (RELU, GELU)
}


@library.public
def gemm_bias_relu(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """max(0, a b + bias), (M, N), of a (M, K), b (K, N) and bias (N,), all float16 or all bfloat16, on one device.

    Sums are fp32, and the result is rounded once. `weight.t()` of an `nn.Linear` is a b that is read in place. If
    the length of a tensor's rows (of such a b: columns) is a multiple of 16 bytes, but they do not start at such multiples, it
    is copied first. `best` picks the kernel, which is compiled at its first call. Works under `torch.compile`. It has no
    backward: raises RuntimeError where one would be recorded. Raises ValueError for tensors that do not fit each other."""
    library.refuse_gradients(RELU, a, b, bias)
    return _gemm_bias_relu_op(a, b, bias)


@library.public
def gemm_bias_gelu(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(a b + bias). All else is as for `gemm_bias_relu`. approximate is "none" (by the error function) or "tanh", as in
    PyTorch; raises ValueError for anything else."""
    library.refuse_gradients(GELU, a, b, bias)
    return _gemm_bias_gelu_op(a, b, bias, approximate)


def _relu(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = TAKES[RELU].make(a, b, bias)
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
    layout, (b,) = library.readable_weights(b)
    tensors = (y, library.readable(a), b, library.readable(bias))
    library.call(name, tensors, a.dtype, {"m": m, "n": n, "k": k}, {"layout": layout, **params}, **scalars)
    return y


def _fake_gelu(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    if approximate not in ("none", "tanh"):
        raise TAKES[GELU].error("approximate='none' or 'tanh'", repr(approximate))
    made: torch.Tensor = TAKES[GELU].make(a, b, bias)
    return made


_gemm_bias_relu_op = library.define(
    "gemm_bias_relu(Tensor a, Tensor b, Tensor bias) -> Tensor", _relu, TAKES[RELU].make
)
_gemm_bias_gelu_op = library.define(
    'gemm_bias_gelu(Tensor a, Tensor b, Tensor bias, str approximate="none") -> Tensor', _gelu, _fake_gelu
)
