"""`softmax`: the kernels of the op of that name as a function of PyTorch."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.functional.contract import Contract
from minfer.functional.norms import rows_of

TAKES = Contract(
    "softmax",
    """
    x: float32 | float16 | bfloat16 (..., n)
    mask: x | int32 (n)
    -> x (..., n)
    """,
)
WITH_LENGTHS = Contract(
    "softmax",
    """
    x: float32 | float16 | bfloat16 (..., n)
    mask: int32 (...)
    -> x (..., n)
    """,
)


@library.public
def softmax(x: torch.Tensor, mask: torch.Tensor | None = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """exp(z - max z) / sum exp(z - max z) over the last dimension, a new tensor of x's shape; z is x under a mask.

    x is (..., n), float32, float16 or bfloat16; sums are fp32. A mask (n,) of x's dtype is added to each row in fp32.
    An int32 mask of the shape x.shape[:-1] has the length of each row: elements from there on are not used, and give 0;
    lengths below 0 count as 0, those above n as n. A row without elements, or with -inf only, gives NaN, as PyTorch
    does. With `out`, of x's shape and dtype, the result is written to `out`, which is returned; if `out` is not
    contiguous, or shares memory with x, the result is computed elsewhere and copied to it. `best` picks the kernel,
    which is compiled at its first call. Works under `torch.compile`. It has no backward: raises RuntimeError where one
    would be recorded. Raises ValueError for tensors that do not fit each other."""
    library.refuse_gradients("softmax", x, mask, out)
    if out is None:
        return _softmax_op(x, mask)
    _softmax_out_op(x, mask, out)
    return out


def _softmax(y: torch.Tensor, x: torch.Tensor, mask: torch.Tensor | None) -> None:
    if not y.numel():
        return
    rows = rows_of(x)
    if mask is None:
        kind, given = "none", x.new_empty(0)
    elif mask.dtype == torch.int32:
        kind, given = "length", mask.reshape(-1).contiguous()
    else:
        kind, given = "additive", library.readable(mask)
    shape = {"rows": rows.shape[0], "n": rows.shape[1]}
    library.call("softmax", (y.view(rows.shape), rows, given), x.dtype, shape, {"mask": kind})


def _contract(x: torch.Tensor, mask: torch.Tensor | None) -> Contract:
    return TAKES if mask is None or mask.dtype != torch.int32 else WITH_LENGTHS


_softmax_op, _softmax_out_op = library.define_with_out("softmax(Tensor x, Tensor? mask) -> Tensor", _softmax, _contract)
