"""`seq_sum`: the kernels of the op of that name as a function of PyTorch, `torch.ops.minfer.seq_sum`."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.functional.contract import Contract

Tensor = torch.Tensor
PADDED = Contract(
    "seq_sum",
    """
    x: float32 | bfloat16 (batch, longest)
    lengths: int32 (batch)
    -> x (batch, longest)
    """,
)
PACKED = Contract(
    "seq_sum",
    """
    x: float32 | bfloat16 (tokens)
    cu_seqlens: int32 (ends)
    -> x (tokens)
    """,
    ends=1,
)


@library.public
def seq_sum(x: Tensor, *, cu_seqlens: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
    """For each element of x the sum of its sequence, a new contiguous tensor of x's shape and dtype.

    x: (batch, longest), float32 or bfloat16, or (tokens,) with cu_seqlens.
    cu_seqlens: int32 (batch + 1,), cumulative lengths from 0, where x is one sequence after the other.
    lengths: int32 (batch,), how many elements of each sequence of a padded batch are used. Those behind them are not.

    Elements of no sequence give 0. Sums are fp32 and the result is rounded once. The host does not check lengths, because it
    would have to wait for the device: lengths out of range are clamped, and nothing is read out of bounds. `best` picks the
    kernel, which is compiled at its first call. Works under `torch.compile`. It has no backward: raises RuntimeError where
    one would be recorded. Raises ValueError for arguments that do not fit."""
    library.refuse_gradients("seq_sum", x)
    if cu_seqlens is not None and lengths is not None:
        raise ValueError("minfer.seq_sum takes cu_seqlens, for packed sequences, or lengths, for padded ones, got both")
    if x.dim() != (2 if cu_seqlens is None else 1):
        wanted = "(batch, longest)" if cu_seqlens is None else "(tokens,) with cu_seqlens"
        raise ValueError(f"minfer.seq_sum takes x of {wanted}, got {tuple(x.shape)}")
    return _seq_sum_op(x, lengths if cu_seqlens is None else cu_seqlens)


def _seq_sum(x: Tensor, seqlens: Tensor | None) -> Tensor:
    y = _fake(x, seqlens)
    if not y.numel():
        return y
    packed = x.dim() == 1
    batch = x.shape[0] if seqlens is None or not packed else max(1, len(seqlens) - 1)
    shape = {"batch": batch, "longest": -(-x.shape[0] // batch) if packed else x.shape[1]}  # the mean, of packed ones
    params = {"layout": "packed" if packed else "padded", "lengths": "full" if seqlens is None else "halving"}
    given = x.new_empty(0, dtype=torch.int32) if seqlens is None else seqlens.contiguous()
    library.call("seq_sum", (y, library.readable(x), given), x.dtype, shape, params)
    return y


def _fake(x: Tensor, seqlens: Tensor | None) -> Tensor:
    made: Tensor = (PACKED if x.dim() == 1 else PADDED).make(x, seqlens)
    return made


_seq_sum_op = library.define("seq_sum(Tensor x, Tensor? seqlens) -> Tensor", _seq_sum, _fake)
