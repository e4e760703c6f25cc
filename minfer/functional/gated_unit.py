"""`gated_unit` and `swiglu`: the kernels of gated_unit as functions of PyTorch, `torch.ops.minfer.gated_unit`."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.functional.contract import Contract

GATED_UNIT = Contract(
    "gated_unit",
    """
    x: float16 | bfloat16 (..., k)
    w1: x (k, n)
    b1: x (n)
    w2: x (k, n)
    b2: x (n)
    -> x (..., n)
    """,
)
SWIGLU = Contract(
    "swiglu",
    """
    x: float16 | bfloat16 (..., k)
    wg: x (k, n)
    wu: x (k, n)
    -> x (..., n)
    """,
)


@library.public
def gated_unit(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor) -> torch.Tensor:
    """sigmoid(x w1 + b1) * (x w2 + b2), (..., N), of x (..., K), weights (K, N) and biases (N,), all float16 or all bfloat16,
    on one device (Dauphin et al., Language modeling with gated convolutional networks, ICML 2017). Sums, biases and gate are
    fp32, and the result is rounded once.

    `best` picks the kernel, which is compiled at its first call; with MINFER_EXPLAIN=1 each choice is printed to stderr once.
    `weight.t()` of an `nn.Linear` is read in place; of weights with different layouts the second is copied. If the length
    of a tensor's rows (of such a weight: columns) is a multiple of 16 bytes, but they do not start at such multiples, it is
    copied first. Works under `torch.compile`. It has no backward: raises RuntimeError where one would be recorded. Raises
    ValueError for tensors that do not fit each other."""
    library.refuse_gradients("gated_unit", x, w1, b1, w2, b2)
    return _gated_unit_op(x, w1, b1, w2, b2)


@library.public
def swiglu(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor) -> torch.Tensor:
    """silu(x wg) * (x wu), (..., N), of x (..., K) and weights (K, N) (Shazeer, GLU variants improve transformer, 2020): what a
    Llama's feed-forward layer computes before its last product. All else is as for `gated_unit`."""
    library.refuse_gradients("swiglu", x, wg, wu)
    return _swiglu_op(x, wg, wu)


def _gated(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = GATED_UNIT.make(x, w1, b1, w2, b2)
    if x.shape[-1] == 0:
        return y.copy_(b1.sigmoid() * b2)
    return _run(y, x, w1, library.readable(b1), w2, library.readable(b2), "sigmoid")


def _swiglu(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = SWIGLU.make(x, wg, wu)
    none = x.new_empty(0)
    return _run(y, x, wg, none, wu, none, "swiglu") if x.shape[-1] else y.zero_()


def _run(
    y: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor, gate: str
) -> torch.Tensor:
    if y.numel() == 0:
        return y
    k, n = w1.shape
    rows = library.readable(x.reshape(-1, k))
    layout, (w1, w2) = library.readable_weights(w1, w2)
    shape = {"m": rows.shape[0], "n": n, "k": k}
    params = {"gate": gate, "layout": layout}
    library.call("gated_unit", (y.view(-1, n), rows, w1, b1, w2, b2), x.dtype, shape, params)
    return y


_gated_unit_op = library.define(
    "gated_unit(Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2) -> Tensor", _gated, GATED_UNIT.make
)
_swiglu_op = library.define("swiglu(Tensor x, Tensor wg, Tensor wu) -> Tensor", _swiglu, SWIGLU.make)
