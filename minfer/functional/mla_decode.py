"""`mla_decode`: the kernels of mla_decode as a function of PyTorch, `torch.ops.minfer.mla_decode`."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.functional.contract import Contract
from minfer.functional.pages import check_pages as check_pages_of
from minfer.ops.mla_decode.baselines import LATENT, ROW, SCALE

Tensor = torch.Tensor
PAGE, MOST_NEW = 64, 8
CONTRACTS = {
    paged: Contract(
        "mla_decode",
        f"""
        q: float16 | bfloat16 (batch, new, heads, {ROW})
        cache: q ({f"pages, {PAGE}" if paged else "batch, slots"}, {ROW})
        lengths: int32 (batch)
        page_table: int32 (batch, most_pages)
        -> q (batch, new, heads, {LATENT})
        """,
        new=range(1, MOST_NEW + 1),
    )
    for paged in (False, True)
}


@library.public
def mla_decode(
    q: Tensor,
    cache: Tensor,
    lengths: Tensor,
    *,
    page_table: Tensor | None = None,
    scale: float | None = None,
    check_pages: bool = False,
) -> Tensor:
    """Multi-head latent attention with absorbed up-projections: softmax(scale q cᵀ) c[:512] of new tokens, over a cache of
    latents that already includes those of the new tokens. Returns a new contiguous tensor, (batch, new, heads, 512).

    q: (batch, new, heads, 576), float16 or bfloat16; 1 to 8 new tokens. The first 512 elements are a head's query times its
        up-projection of keys; the last 64 are the rotated part of the query.
    cache: (batch, slots, 576), or with `page_table` (pages, 64, 576), of q's dtype: latents, and behind each the rotated key
        that all heads share.
    lengths: int32 (batch,), how many keys each sequence has, including its new tokens. Query i is at position length - new +
        i, and sees the keys up to that position; a query at a negative position gives 0.
    page_table: int32 (batch, most pages): position j of sequence b is slot j % 64 of page page_table[b, j // 64]. Entries
        behind a sequence's last page are not read.
    scale: 1 / sqrt(192) unless given, for keys of 128 elements and 64 rotated ones.
    check_pages: raise ValueError if a page index that is read is out of range, or if a length exceeds what the cache can hold.
        The check waits for the device. Without it, such values give a meaningless result, but nothing is read out of bounds.

    The caller still has to multiply the result with each head's up-projection of values. Sums are fp32 and out is rounded once.
    Each launch divides the work on the device, by the lengths at that time. So a captured CUDA graph may be replayed after
    lengths, pages and their order have changed in place. `best` picks the kernel, which is compiled at its first call. Works
    under `torch.compile`. There is no backward: raises RuntimeError if autograd would record this call. Raises ValueError for
    arguments that do not fit."""
    library.refuse_gradients("mla_decode", q, cache)
    if scale is not None and not scale > 0:
        raise ValueError(f"minfer.mla_decode takes a scale above 0, or None, got {scale}")
    if check_pages:
        CONTRACTS[page_table is not None].check(q, cache, lengths, page_table)
        check_pages_of("mla_decode", cache, lengths, page_table)
    found: Tensor = _mla_decode_op(q, cache, lengths, page_table, scale or SCALE)
    return found


def _mla_decode(q: Tensor, cache: Tensor, lengths: Tensor, page_table: Tensor | None, scale: float) -> Tensor:
    out = _fake(q, cache, lengths, page_table, scale)
    if not q.numel() or not cache.numel() or (page_table is not None and not page_table.numel()):
        return out.zero_()
    longest = cache.shape[1] if page_table is None else PAGE * page_table.shape[1]
    shape = {"batch": q.shape[0], "new": q.shape[1], "longest": longest, "heads": q.shape[2]}
    params = {"page": "none" if page_table is None else str(PAGE), "lengths": "full"}
    table = q.new_empty((q.shape[0], 0), dtype=torch.int32) if page_table is None else page_table.contiguous()
    tensors = (out, library.readable(q), lengths.contiguous(), table, library.readable(cache))
    library.call("mla_decode", tensors, q.dtype, shape, params, scale=scale)
    return out


def _fake(q: Tensor, cache: Tensor, lengths: Tensor, page_table: Tensor | None, scale: float) -> Tensor:
    made: Tensor = CONTRACTS[page_table is not None].make(q, cache, lengths, page_table)
    return made


_mla_decode_op = library.define(
    "mla_decode(Tensor q, Tensor cache, Tensor lengths, Tensor? page_table, float scale) -> Tensor", _mla_decode, _fake
)
