"""`embedding`: the kernels of embedding as one function of PyTorch, `torch.ops.minfer.embedding`."""

from __future__ import annotations

import torch

from minfer.functional import library


@library.public
def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The rows of a table (vocab, hidden) at ids of any shape: a new tensor (*ids.shape, hidden).

    The table is float32, float16 or bfloat16, ids are int64 or int32, on one device. An id below 0 or from vocab on gives a
    row of NaN and reads nothing; it raises no error, because that would wait for the GPU. A table is copied at each call if
    its rows are not contiguous, or if their length is a multiple of 16 bytes but they do not start at one. `best` picks the
    kernel, which is compiled at its first call. Works under `torch.compile`. It has no backward: raises RuntimeError where
    one would be recorded. Raises ValueError for arguments that do not fit."""
    library.refuse_gradients("embedding", table, detached="a detached table")
    return _embedding_op(ids, table)


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


def _fake(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    if table.dim() != 2:
        raise ValueError(f"minfer.embedding takes a table (vocab, hidden), got {tuple(table.shape)}")
    if table.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"minfer.embedding takes a table of float32, float16 or bfloat16, got {table.dtype}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"minfer.embedding takes ids of int64 or int32, got {ids.dtype}")
    if ids.device != table.device:
        raise ValueError(f"minfer.embedding takes ids and table on one device, got {ids.device} and {table.device}")
    return table.new_empty(*ids.shape, table.shape[1])


_embedding_op = library.define("embedding(Tensor ids, Tensor table) -> Tensor", _gather, _fake)
