"""`gated_unit` and `swiglu`: the kernels of gated_unit as functions of PyTorch, `torch.ops.minfer.gated_unit`."""

from __future__ import annotations

import torch

from minfer.functional import library

# Not taken for fewer columns than any that were measured: there its N-slices leave SMs idle.
LEAST = {"v05_one_wave": "n"}


@library.public
def gated_unit(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor) -> torch.Tensor:
    """sigmoid(x w1 + b1) * (x w2 + b2), (..., N), of x (..., K), weights (K, N) and biases (N,), all float16 or all bfloat16,
    on one device (Dauphin et al., Language modeling with gated convolutional networks, ICML 2017). Sums, biases and gate are
    fp32, and the result is rounded once.

    `best` picks the kernel, which is compiled at its first call; with MINFER_EXPLAIN=1 each choice is printed to stderr once.
    `weight.t()` of an `nn.Linear` is read in place; of weights with different layouts the second is copied. A tensor whose
    rows (of such a weight: columns) do not start at multiples of 16 bytes is copied first. Works under `torch.compile`. It
    has no backward: raises RuntimeError where one would be recorded. Raises ValueError for tensors that do not fit each
    other."""
    library.refuse_gradients("gated_unit", x, w1, b1, w2, b2)
    return _gated_unit_op(x, w1, b1, w2, b2)


@library.public
def swiglu(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor) -> torch.Tensor:
    """silu(x wg) * (x wu), (..., N), of x (..., K) and weights (K, N) (Shazeer, GLU variants improve transformer, 2020): what a
    Llama's feed-forward layer computes before its last product. All else is as for `gated_unit`."""
    library.refuse_gradients("swiglu", x, wg, wu)
    return _swiglu_op(x, wg, wu)


def _check(name: str, x: torch.Tensor, weights: dict[str, torch.Tensor], biases: dict[str, torch.Tensor]) -> None:
    if x.dim() < 1:
        raise ValueError(f"minfer.{name} takes x of (..., K), got a tensor without dimensions")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"minfer.{name} takes float16 or bfloat16, got x of {x.dtype}")
    for what, tensor in (weights | biases).items():
        if tensor.dtype != x.dtype:
            raise ValueError(f"minfer.{name} takes {what} of x's dtype, {x.dtype}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"minfer.{name} takes {what} on x's device, {x.device}, got {tensor.device}")
    first = next(iter(weights.values()))
    n = first.shape[1] if first.dim() == 2 else "N"
    for what, tensor in weights.items():
        if tensor.dim() != 2 or tensor.shape[0] != x.shape[-1] or tensor.shape[1] != n:
            raise ValueError(f"minfer.{name} takes {what} of ({x.shape[-1]}, {n}), got {tuple(tensor.shape)}")
    for what, tensor in biases.items():
        if tuple(tensor.shape) != (n,):
            raise ValueError(f"minfer.{name} takes {what} of ({n},), got {tuple(tensor.shape)}")


def _gated_fake(
    x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor
) -> torch.Tensor:
    _check("gated_unit", x, {"w1": w1, "w2": w2}, {"b1": b1, "b2": b2})
    return x.new_empty(*x.shape[:-1], w1.shape[1])


def _swiglu_fake(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor) -> torch.Tensor:
    _check("swiglu", x, {"wg": wg, "wu": wu}, {})
    return x.new_empty(*x.shape[:-1], wg.shape[1])


def _gated(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor) -> torch.Tensor:
    y = _gated_fake(x, w1, b1, w2, b2)
    if x.shape[-1] == 0:
        return y.copy_(b1.sigmoid() * b2)
    return _run(y, x, w1, library.readable(b1), w2, library.readable(b2), "sigmoid")


def _swiglu(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor) -> torch.Tensor:
    y, none = _swiglu_fake(x, wg, wu), x.new_empty(0)
    return _run(y, x, wg, none, wu, none, "swiglu") if x.shape[-1] else y.zero_()


def _run(
    y: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor, gate: str
) -> torch.Tensor:
    if y.numel() == 0:
        return y
    k, n = w1.shape
    rows = library.readable(x.reshape(-1, k))
    if w1.stride(0) == 1 and not (w1.stride(1) == 1 and n == 1):
        w1, w2, layout = library.readable(w1.t()).t(), library.readable(w2.t()).t(), "TN"
    else:
        w1, w2, layout = library.readable(w1), library.readable(w2), "NN"
    shape = {"m": rows.shape[0], "n": n, "k": k}
    params = {"gate": gate, "layout": layout}
    library.call("gated_unit", (y.view(-1, n), rows, w1, b1, w2, b2), x.dtype, shape, params, LEAST)
    return y


_gated_unit_op = library.define(
    "gated_unit(Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2) -> Tensor", _gated, _gated_fake
)
_swiglu_op = library.define("swiglu(Tensor x, Tensor wg, Tensor wu) -> Tensor", _swiglu, _swiglu_fake)
