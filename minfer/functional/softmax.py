"""`softmax`: the kernels of the op of that name as a function of PyTorch."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.functional.norms import DTYPES, rows_of


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


def _softmax(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    y = _softmax_fake(x, mask)
    _write(x, mask, y)
    return y


def _softmax_into(x: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor) -> None:
    _softmax_fake_into(x, mask, out)
    if library.is_writable(out, x, mask):
        _write(x, mask, out)
    else:
        out.copy_(_softmax(x, mask))


def _write(x: torch.Tensor, mask: torch.Tensor | None, y: torch.Tensor) -> None:
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


def _softmax_fake(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if x.dtype not in DTYPES:
        raise ValueError(f"minfer.softmax takes an x of float32, float16 or bfloat16, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("minfer.softmax takes an x of at least one dimension, got a scalar")
    if mask is not None:
        if mask.dtype not in (x.dtype, torch.int32):
            raise ValueError(f"minfer.softmax takes a mask of x's dtype {x.dtype}, or int32 lengths, got {mask.dtype}")
        wanted = x.shape[:-1] if mask.dtype == torch.int32 else x.shape[-1:]
        if mask.shape != wanted:
            raise ValueError(
                f"minfer.softmax takes a mask of the shape {tuple(wanted)} for this x, got {tuple(mask.shape)}"
            )
        if mask.device != x.device:
            raise ValueError(f"minfer.softmax takes a mask on x's device {x.device}, got {mask.device}")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _softmax_fake_into(x: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor) -> None:
    _softmax_fake(x, mask)
    library.check_out("softmax", out, x.shape, x)


_softmax_op = library.define("softmax(Tensor x, Tensor? mask) -> Tensor", _softmax, _softmax_fake)
_softmax_out_op = library.define(
    "softmax_out(Tensor x, Tensor? mask, Tensor(a!) out) -> ()", _softmax_into, _softmax_fake_into
)
