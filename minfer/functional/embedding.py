"""`embedding`: the kernels of embedding as one function of PyTorch, `torch.ops.minfer.embedding`."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.functional.contract import Contract

TAKES = Contract(
    "embedding",
    """
    table: float32 | float16 | bfloat16 (vocab, hidden)
    ids: int64 | int32 (...)
    -> table (..., hidden)
    """,
)


@library.public
def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The rows of a table (vocab, hidden) at ids of any shape: a new tensor (*ids.shape, hidden).

    The table is float32, float16 or bfloat16, ids are int64 or int32, on one device. An id below 0 or from vocab on gives a
    row of NaN and reads nothing; it raises no error, because that would wait for the GPU. A table is copied at each call if
    its rows are not contiguous, or if their length is a multiple of 16 bytes but they do not start at one. `best` picks the
    kernel, which is compiled at its first call. Works under `torch.compile`. It has no backward: raises RuntimeError where
    one would be recorded. Raises ValueError for arguments that do not fit."""
    library.refuse_gradients("embedding", table)
    return _embedding_op(ids, table)


def _fake(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = TAKES.make(table, ids)
    return made


def _gather(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    y = _fake(ids, table)
    if y.numel() == 0:
        return y
    if len(table) == 0:  # no id is in range
        return y.fill_(float("nan"))
    flat = ids.reshape(-1).contiguous()
    shape = {"tokens": flat.numel(), "vocab": table.shape[0], "hidden": table.shape[1]}
    params = {"ids": "int64" if ids.dtype == torch.int64 else "int32"}
    tensors = (y.view(-1, table.shape[1]), flat, library.readable(table))
    library.call("embedding", tensors, table.dtype, shape, params)
    return y


_embedding_op = library.define("embedding(Tensor ids, Tensor table) -> Tensor", _gather, _fake)
