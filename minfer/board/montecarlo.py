"""How far rounding moves the outputs of a computation that nobody analysed: Monte Carlo arithmetic (Parker, Monte Carlo
arithmetic, 1997).

The computation runs in fp64. After each of PyTorch's operations, its floating-point results get random errors, as large as
those that arithmetic in fp32 may make there. These are a rounding of each element and, for a sum of n products, sqrt(n) u times
the magnitude of its terms, which is a fourth of the bound `minfer.ops.bounds.dot`. Some operations compute sums inside, such as
a norm. Each element of their inputs gets its own rounding and that of a typical element. The root mean square of the errors
that an output then has, over some runs, is the standard deviation of its rounding errors. A bound allows `DEVIATIONS` of these
standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from minfer.ops.bounds import ROUNDOFF

RUNS = 8
ROUNDINGS = 4  # of an element by an operation that is not a sum, such as an exponential
LEAST = 0.05  # least deviation of an element, over the root mean square of all: if it is smaller, that is chance
INSIDE = (
    "norm",
    "softmax",
    "loss",
    "lstm",
    "gru",
    "attention",
    "var",
    "std",
    "logsumexp",
)  # names of operations with sums inside
UNIT = ROUNDOFF["float32"]
VIEWS = (  # names of operations that compute nothing
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "slice", "select", "squeeze", "unsqueeze",
    "unbind", "alias", "detach", "clone", "copy_", "_to_copy", "cat", "stack", "split", "chunk", "zeros", "ones", "full",
    "empty",
)  # fmt: skip


def terms_of(name: str, arguments: Sequence[Any]) -> int:
    """How many terms each sum of an operation has. 0 for an operation that does not give the sums of the terms' magnitudes when
    it is called with its arguments' magnitudes."""
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    if name in ("mm", "bmm"):
        return tensors[0].shape[-1]
    if name in ("addmm", "baddbmm"):
        return tensors[1].shape[-1]
    if name == "convolution":
        transposed = bool(arguments[6])
        weight = tensors[1]
        return math.prod(weight.shape[2:]) * (weight.shape[0] if transposed else weight.shape[1])
    if name in ("sum", "mean", "avg_pool2d", "_adaptive_avg_pool2d", "cumsum"):
        return max(1, tensors[0].numel())
    return 0


class Rounding(TorchDispatchMode):
    """Adds errors of fp32 to what PyTorch's operations return."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        named = named or {}
        name = function.overloadpacket.__name__
        if name in VIEWS or function.is_view or name.endswith("_"):
            return function(*arguments, **named)
        if any(word in name for word in INSIDE):
            arguments = tree_map(_disturb_inside, arguments)
        found = function(*arguments, **named)
        magnitude, terms = None, terms_of(name, arguments)
        if terms:
            absolute = tree_map(lambda each: each.abs() if isinstance(each, torch.Tensor) else each, arguments)
            magnitude = function(*absolute, **named)

        def disturb(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dtype != torch.float64:
                return value
            error = ROUNDINGS * UNIT * value.abs()
            if magnitude is not None:
                error = error + math.sqrt(terms) * UNIT * magnitude
            return value + error * torch.randn_like(value)

        return tree_map(disturb, found)


def _disturb_inside(value: Any) -> Any:
    """An input of an operation with sums inside, with errors: each element gets its own rounding and that of a typical
    element."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float64 or not value.numel():
        return value
    typical = value.square().mean().sqrt()
    return value + ROUNDINGS * UNIT * (value.abs() + typical) * torch.randn_like(value)


def spread(compute: Callable[[], Sequence[torch.Tensor]], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The standard deviation of each element of what `compute` returns, in fp64; `values` is what it returns without errors."""
    squares = [torch.zeros_like(value) for value in values]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)  # so that a verdict can be repeated
        for _ in range(RUNS):
            with Rounding():
                found = compute()
            for square, one, value in zip(squares, found, values, strict=True):
                square += (one - value).square() / RUNS
    deviations = [square.sqrt() for square in squares]
    return [torch.maximum(each, LEAST * each.square().mean().sqrt()) for each in deviations]
