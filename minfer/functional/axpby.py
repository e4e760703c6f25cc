"""`axpby`: the kernels of axpby as one function of PyTorch, `torch.ops.minfer.axpby`."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.functional.contract import Contract

TAKES = Contract(
    "axpby",
    """
    a: float32 (...)
    b: float32 (...)
    -> float32 (...)
    """,
)


@library.public
def axpby(
    a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, beta: float = 1.0, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """alpha a + beta b, a new contiguous tensor, of two float32 tensors of one shape and device.

    Operands that are not contiguous, or do not start at multiples of 16 bytes, are copied first. With `out`, of their
    shape and dtype, the result is written to `out`, which is returned; if `out` is not contiguous, or shares memory
    with an operand, the result is computed elsewhere and copied to it. `best` picks the kernel, which is compiled at
    its first call. Works under `torch.compile`. It has no backward: raises RuntimeError where one would be recorded.
    Raises ValueError for operands that do not fit each other."""
    library.refuse_gradients("axpby", a, b, out)
    if out is None:
        return _axpby_op(a, b, alpha, beta)
    _axpby_out_op(a, b, alpha, beta, out)
    return out


def _combine(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, beta: float = 1.0) -> None:
    if count := y.numel():
        flat = [library.readable(tensor.reshape(count)) for tensor in (a, b)]
        library.call("axpby", (y.view(count), *flat), y.dtype, {"n": count}, alpha=alpha, beta=beta)


_axpby_op, _axpby_out_op = library.define_with_out(
    "axpby(Tensor a, Tensor b, float alpha=1.0, float beta=1.0) -> Tensor", _combine, lambda *_: TAKES
)
