"""`decode_attention`: the kernels of decode_attention as a function of PyTorch, `torch.ops.minfer.decode_attention`."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.functional.pages import check_pages as check_pages_of

Tensor = torch.Tensor
DTYPES = (torch.float16, torch.bfloat16)
DIMS, PAGES, MOST_NEW = (64, 128, 256), (16, 64, 256), 8


@library.public
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    page_table: Tensor | None = None,
    scales: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    check_pages: bool = False,
) -> Tensor:
    """softmax(scale q kᵀ) v of new tokens over a key-value cache that already has them, a new contiguous tensor of q's shape.

    q: (batch, new, heads, head_dim), float16 or bfloat16; 1 to 8 new tokens; head_dim is 64, 128 or 256.
    k_cache, v_cache: (batch, slots, kv_heads, head_dim); or with `page_table` (pages, slots, kv_heads, head_dim), pages of 16,
        64 or 256 slots. kv_heads divides heads: query head h reads key-value head h // (heads / kv_heads). Of q's dtype or,
        with `scales`, float8_e4m3fn.
    lengths: int32 (batch,), how many keys each sequence has, including its new tokens. Query i is at position length - new +
        i, and sees the keys up to that position; a query at a negative position gives 0.
    page_table: int32 (batch, most pages): position j of sequence b is slot j % slots of page page_table[b, j // slots]. Entries
        behind a sequence's last page are not read.
    scales: float32 (2,), what keys and values of an fp8 cache are multiplied with.
    scale: 1 / sqrt(head_dim) unless given.
    window: a query sees only keys less than `window` positions away, its own among them. Keys before it are not read.
    softcap: scores become softcap * tanh(score / softcap).
    sinks: float32 (heads,), a score without a value for each query head: it only adds to the denominator.
    check_pages: raise ValueError for a page index out of range among those that are read, or a length that the caches do not
        have; this waits for the device. Without it, such values give a meaningless result, but nothing is read out of bounds.

    Sums are fp32 and out is rounded once. The device divides the work by the present lengths, so that a captured CUDA graph
    may be replayed after lengths, pages and their order have changed in place. `best` picks the kernel, which is compiled at
    its first call. Works under `torch.compile`. It has no backward: raises RuntimeError where one would be recorded. Raises
    ValueError for arguments that do not fit."""
    library.refuse_gradients("decode_attention", q, k_cache, v_cache, sinks)
    for name, value in (("scale", scale), ("window", window), ("softcap", softcap)):
        if value is not None and not value > 0:
            raise ValueError(f"minfer.decode_attention takes a {name} above 0, or None, got {value}")
    if check_pages:
        _check(q, k_cache, v_cache, lengths, page_table, scales, sinks)
        check_pages_of("decode_attention", k_cache, lengths, page_table)
    found: Tensor = _decode_attention_op(
        q, k_cache, v_cache, lengths, page_table, scales, sinks, scale or 0.0, window or 0, softcap or 0.0
    )
    return found


def _decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    scales: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    out = _fake(q, k_cache, v_cache, lengths, page_table, scales, sinks, scale, window, softcap)
    if not q.numel() or not k_cache.numel() or (page_table is not None and not page_table.numel()):
        return out.zero_()
    slots, kv_heads = k_cache.shape[1:3]
    longest = slots if page_table is None else slots * page_table.shape[1]
    shape = {"batch": q.shape[0], "new": q.shape[1], "longest": longest}
    shape |= {"heads": q.shape[2], "kv_heads": kv_heads, "head_dim": q.shape[3]}
    params = {"page": "none" if page_table is None else str(slots), "lengths": "full"}
    params["quant"] = "none" if scales is None else "fp8"
    table = q.new_empty((q.shape[0], 0), dtype=torch.int32) if page_table is None else page_table.contiguous()
    factors = q.new_empty(0, dtype=torch.float32) if scales is None else scales.contiguous()
    caches = map(library.readable, (k_cache, v_cache))
    tensors = (out, library.readable(q), lengths.contiguous(), table, *caches, factors)
    if not window and not softcap and sinks is None:
        library.call("decode_attention", tensors, q.dtype, shape, params, scale=scale)
        return out
    added = q.new_empty(0, dtype=torch.float32) if sinks is None else sinks.contiguous()
    scalars = {"scale": scale, "window": window, "softcap": softcap}
    library.call_entry("decode_attention", "scored", (*tensors, added), **scalars)
    return out


def _fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    scales: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    _check(q, k_cache, v_cache, lengths, page_table, scales, sinks)
    return q.new_empty(q.shape)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    scales: Tensor | None,
    sinks: Tensor | None,
) -> None:
    def refuse(takes: str, got: object) -> ValueError:
        return ValueError(f"minfer.decode_attention takes {takes}, got {got}")

    if q.dtype not in DTYPES:
        raise refuse("q of float16 or bfloat16", q.dtype)
    if q.dim() != 4:
        raise refuse("q of (batch, new, heads, head_dim)", tuple(q.shape))
    if not 1 <= q.shape[1] <= MOST_NEW:
        raise refuse(f"q of 1 to {MOST_NEW} new tokens a sequence", q.shape[1])
    if q.shape[3] not in DIMS:
        raise refuse("a head_dim of 64, 128 or 256", q.shape[3])
    stored = q.dtype if scales is None else torch.float8_e4m3fn
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype != stored:
            raise refuse(f"{name} of {stored}", cache.dtype)
        if cache.dim() != 4 or cache.shape[3] != q.shape[3]:
            raise refuse(f"{name} of (blocks, slots, kv_heads, {q.shape[3]})", tuple(cache.shape))
    if v_cache.shape != k_cache.shape:
        raise refuse(f"v_cache of the shape of k_cache, {tuple(k_cache.shape)}", tuple(v_cache.shape))
    if k_cache.shape[2] == 0 or q.shape[2] % k_cache.shape[2]:
        raise refuse(f"a k_cache whose number of heads divides the {q.shape[2]} of q", k_cache.shape[2])
    if lengths.dtype != torch.int32 or lengths.shape != (q.shape[0],):
        raise refuse(f"lengths of int32 and the shape ({q.shape[0]},)", f"{lengths.dtype}, {tuple(lengths.shape)}")
    if page_table is None:
        if k_cache.shape[0] != q.shape[0]:
            raise refuse(f"k_cache of as many sequences as q has, {q.shape[0]}", k_cache.shape[0])
    else:
        if page_table.dtype != torch.int32 or page_table.dim() != 2 or page_table.shape[0] != q.shape[0]:
            raise refuse(
                f"page_table of int32 and the shape ({q.shape[0]}, pages)",
                f"{page_table.dtype}, {tuple(page_table.shape)}",
            )
        if k_cache.shape[1] not in PAGES:
            raise refuse("k_cache of pages of 16, 64 or 256 slots", k_cache.shape[1])
    if scales is not None and (scales.dtype != torch.float32 or scales.shape != (2,)):
        raise refuse("scales of float32 and the shape (2,)", f"{scales.dtype}, {tuple(scales.shape)}")
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != q.shape[2:3]):
        raise refuse(f"sinks of float32 and the shape ({q.shape[2]},)", f"{sinks.dtype}, {tuple(sinks.shape)}")
    others = {"k_cache": k_cache, "v_cache": v_cache, "lengths": lengths, "page_table": page_table}
    others |= {"scales": scales, "sinks": sinks}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != q.device:
            raise refuse(f"{name} on the device of q, {q.device}", tensor.device)


_decode_attention_op = library.define(
    "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, Tensor? page_table, Tensor? scales, "
    "Tensor? sinks, float scale, SymInt window, float softcap) -> Tensor",
    _decode_attention,
    _fake,
)
