"""`kv_append_`: the kernels of kv_append as one function of PyTorch, `torch.ops.minfer.kv_append_`."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.ops.kv_append import PAGE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@library.public
def kv_append_(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens to two caches, (blocks, slots, kv_heads, head_dim), contiguous, in place.

    Paged, where k and v are (tokens, kv_heads, head_dim): token t is written to where[t] = page * slots + slot, a slot
    mapping as vLLM has it. Contiguous, where k and v are (batch, new, kv_heads, head_dim) and a block is a sequence: where[i]
    is the position of the first new token of sequence i. `where` is int64. Tokens whose place is outside of the cache, such
    as -1 for padding, are not written. If two tokens have the same place, either may be kept.

    The caches have the dtype of k and v, float32, float16 or bfloat16. With `scales`, float32 (2,), one for k and one for v,
    the caches are float8_e4m3fn and keep value / scale, saturated to 448. k and v may be parts of one projection, with other
    columns between their tokens; what a kernel cannot read is copied first. `best` picks the kernel, which is compiled at its
    first call. Works under `torch.compile`. It has no backward: raises RuntimeError where one would be recorded. Raises
    ValueError for arguments that do not fit."""
    library.refuse_gradients("kv_append_", k_cache, v_cache, k, v)
    _kv_append_op(k_cache, v_cache, k, v, where, scales)


def _append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    _check(k_cache, v_cache, k, v, where, scales)
    if k.numel() == 0 or k_cache.numel() == 0:
        return
    paged, (slots, heads, dim) = k.dim() == 3, k_cache.shape[1:]
    rows = [library.readable(tensor.reshape(-1, heads * dim)) for tensor in (k, v)]
    batch, new = (k.shape[0], 1) if paged else k.shape[:2]
    if not paged:
        rows = [tensor.unflatten(0, (batch, new)) for tensor in rows]
    shape = {"batch": batch, "longest": PAGE if paged else slots, "new": new, "kv_heads": heads, "head_dim": dim}
    params = {"cache": "paged" if paged else "contiguous", "quant": "none" if scales is None else "fp8"}
    more = () if scales is None else (scales.contiguous(),)
    tensors = (k_cache, v_cache, *rows, where.contiguous(), *more)
    library.call("kv_append", tensors, k.dtype, shape, params | {"padding": "none"})


def _check(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Raises ValueError for arguments that do not fit; also serves as the fake kernel."""
    who, stored = "minfer.kv_append_ takes", k.dtype if scales is None else torch.float8_e4m3fn
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        shapes = f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        raise ValueError(f"{who} two caches (blocks, slots, kv_heads, head_dim) of one shape, got {shapes}")
    if k.dim() not in (3, 4) or k.shape != v.shape or k.shape[-2:] != k_cache.shape[2:]:
        wanted = (
            f"(tokens, {k_cache.shape[2]}, {k_cache.shape[3]}) or (batch, new, {k_cache.shape[2]}, {k_cache.shape[3]})"
        )
        raise ValueError(f"{who} k and v of one shape, {wanted}, got {tuple(k.shape)} and {tuple(v.shape)}")
    if k.dim() == 4 and k.shape[0] != k_cache.shape[0]:
        raise ValueError(f"{who} k of as many sequences as the cache has, {k_cache.shape[0]}, got {k.shape[0]}")
    if where.dtype != torch.int64 or where.shape != k.shape[:1]:
        raise ValueError(
            f"{who} where of int64 and the shape ({k.shape[0]},), got {where.dtype} and {tuple(where.shape)}"
        )
    if k.dtype not in DTYPES or v.dtype != k.dtype:
        raise ValueError(f"{who} k and v of one dtype, float32, float16 or bfloat16, got {k.dtype} and {v.dtype}")
    if k_cache.dtype != stored or v_cache.dtype != stored:
        raise ValueError(f"{who} caches of {stored}, got {k_cache.dtype} and {v_cache.dtype}")
    if scales is not None and (scales.dtype != torch.float32 or scales.shape != (2,)):
        raise ValueError(f"{who} scales of float32 and the shape (2,), got {scales.dtype} and {tuple(scales.shape)}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(f"{who} contiguous caches, which it changes in place; got strides {k_cache.stride()}")
    devices = {tensor.device for tensor in (k_cache, v_cache, k, v, where, *([] if scales is None else [scales]))}
    if len(devices) > 1:
        raise ValueError(f"{who} tensors on one device, got {' and '.join(sorted(map(str, devices)))}")


_kv_append_op = library.define(
    "kv_append_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor where, Tensor? scales=None) -> ()",
    _append,
    _check,
)
