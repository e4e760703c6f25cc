"""`decode_attention`: the kernels of decode_attention as a function of PyTorch, `torch.ops.minfer.decode_attention`."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from minfer.functional import library
from minfer.functional.contract import Contract
from minfer.functional.pages import check_pages as check_pages_of
from minfer.functional.pages import is_power_of_two, page_of_prefill
from minfer.ops.decode_attention import v_dim_beside

Tensor = torch.Tensor
DIMS, MOST_NEW = (64, 96, 128, 192, 256), 16
# Slots of a page and new tokens that every kernel takes. v05_scored takes all others.
PAGES, FEW_NEW = (16, 64, 256), 8
# Rows of queries that share keys: up to so many, or over fewer keys, decode_attention's own kernels are the fastest. Above,
# they read keys several times (docs/decode_attention.md has a time).
FEW_ROWS, FEW_KEYS = 32, 256
LEAST_SLOTS = 8  # of a page, for those kernels


def _contract(paged: bool, quantised: bool, packed: bool) -> Contract:
    stored = "float8_e4m3fn" if quantised else "q"
    cache = f"{stored} ({'pages' if paged else 'batch'}, slots, kv_heads"
    return Contract(
        "decode_attention",
        f"""
        q: float16 | bfloat16 (batch, new, heads, head_dim)
        k_cache: {cache}, head_dim)
        v_cache: {cache}, v_dim)
        lengths: int32 (batch)
        page_table: int32 (batch, most_pages)
        scales: float32 (2)
        sinks: float32 (heads)
        mask: {"int32 (batch, new)" if packed else "bool (batch, new, new)"}
        -> q (batch, new, heads, v_dim)
        """,
        new=range(1, MOST_NEW + 1),
        head_dim=DIMS,
        kv_heads="heads",
    )


CONTRACTS = {how: _contract(*how) for how in itertools.product((False, True), repeat=3)}


def v_dim_of(q: Tensor) -> int:
    """The length of the rows of v and out beside q."""
    return v_dim_beside(q.shape[-1]) if q.dim() else 0


def _contract_of(page_table: Tensor | None, scales: Tensor | None, mask: Tensor | None) -> Contract:
    return CONTRACTS[page_table is not None, scales is not None, mask is not None and mask.dtype == torch.int32]


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
    mask: Tensor | None = None,
    check_pages: bool = False,
) -> Tensor:
    """softmax(scale q kᵀ) v of new tokens over a key-value cache that already has them, a new contiguous tensor of (batch, new,
    heads, v_dim).

    q: (batch, new, heads, head_dim), float16 or bfloat16; 1 to 16 new tokens; head_dim is 64, 96, 128, 192 or 256.
    k_cache, v_cache: (batch, slots, kv_heads, head_dim), v_cache with v_dim, which is head_dim, or 128 where that is 192; or
        with `page_table` (pages, slots, kv_heads, head_dim) and likewise, where the slots of a page are a power of two.
        kv_heads divides heads: query head h reads key-value head h // (heads / kv_heads). Of q's dtype or, with `scales`,
        float8_e4m3fn.
    lengths: int32 (batch,), how many keys each sequence has, including its new tokens. Query i is at position length - new +
        i, and sees the keys up to that position; a query at a negative position gives 0.
    page_table: int32 (batch, most pages): position j of sequence b is slot j % slots of page page_table[b, j // slots]. Entries
        behind a sequence's last page are not read.
    scales: float32 (2,), the factor of k and the factor of v, for caches in fp8.
    scale: 1 / sqrt(head_dim) unless given.
    window: a query sees only keys less than `window` positions away, its own among them. Keys before it are not read.
    softcap: scores become softcap * tanh(score / softcap).
    sinks: float32 (heads,), a score without a value for each query head: it only adds to the denominator.
    mask: bool (batch, new, new), which new tokens each new token sees, as for a tree of drafts: query i sees new token j where
        mask[b, i, j], and all keys before the new tokens. Or int32 (batch, new), whose bit j says the same. Without it, query i
        sees the new tokens up to its own. A call with a mask takes no window.
    check_pages: raise ValueError for a page index out of range among those that are read, or a length that the caches do not
        have; this waits for the device. Without it, such values give a meaningless result, but nothing is read out of bounds.

    Sums are fp32 and out is rounded once. The device divides the work by the present lengths, so that a captured CUDA graph
    may be replayed after lengths, pages and their order have changed in place. `best` picks the kernel, which is compiled at
    its first call. On sm_90 it is a kernel of `attention` if more than 32 rows of queries share keys (new * heads / kv_heads),
    each sequence has room for at least 256 keys, pages have at least 8 slots, heads are of 64 or 128, and there is no mask,
    window, softcap, sinks or scales. Works under `torch.compile`. It has no backward: raises RuntimeError where one would be
    recorded. Raises ValueError for arguments that do not fit."""
    library.refuse_gradients("decode_attention", q, k_cache, v_cache, sinks, scales)
    if scales is None and k_cache.dtype == torch.float8_e4m3fn:
        raise ValueError("minfer.decode_attention takes scales beside caches of float8_e4m3fn, got None")
    if window is not None or softcap is not None or scale is not None:
        for name, value in (("scale", scale), ("window", window), ("softcap", softcap)):
            if value is not None and not value > 0:
                raise ValueError(f"minfer.decode_attention takes a {name} above 0, or None, got {value}")
    if mask is not None and window is not None:
        raise ValueError(f"minfer.decode_attention takes no window beside a mask, got {window}")
    if check_pages:
        contract = _contract_of(page_table, scales, mask)
        contract.check(q, k_cache, v_cache, lengths, page_table, scales, sinks, mask, v_dim=v_dim_of(q))
        check_pages_of("decode_attention", k_cache, lengths, page_table)
    found: Tensor = _decode_attention_op(
        q, k_cache, v_cache, lengths, page_table, scales, sinks, mask, scale or 0.0, window or 0, softcap or 0.0
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
    mask: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    out = _make(q, k_cache, v_cache, lengths, page_table, scales, sinks, mask)
    if not q.numel() or not k_cache.numel() or (page_table is not None and not page_table.numel()):
        return out.zero_()
    slots, kv_heads = k_cache.shape[1:3]
    longest = slots if page_table is None else slots * page_table.shape[1]
    table = q.new_empty((q.shape[0], 0), dtype=torch.int32) if page_table is None else page_table.contiguous()
    factors = q.new_empty(0, dtype=torch.float32) if scales is None else scales.contiguous()
    rows, keys, values = map(library.readable, (q, k_cache, v_cache))
    tensors = (out, rows, lengths.contiguous(), table, keys, values, factors)
    is_plain = not window and not softcap and sinks is None and mask is None
    shape = {"batch": q.shape[0], "new": q.shape[1], "longest": longest}
    shape |= {"heads": q.shape[2], "kv_heads": kv_heads, "head_dim": q.shape[3]}
    if v_cache.shape[3] != q.shape[3]:
        shape["v_dim"] = v_cache.shape[3]
    params = {"page": "none" if page_table is None else str(slots), "lengths": "full"}
    params["quant"] = "none" if scales is None else "fp8"
    is_in_reach = is_plain and scales is None and (page_table is None or slots >= LEAST_SLOTS) and _is_on_hopper(q)
    if is_in_reach and is_for_prefill(q.shape[1], longest, q.shape[2], kv_heads, q.shape[3]):
        library.note("decode_attention", q.dtype, shape, params, "prefill_attention's kernels, for many rows")
        _attend_as_prompts(out, rows, keys, values, lengths.contiguous(), page_table, longest, scale)
        return out
    if is_plain and q.shape[1] <= FEW_NEW and (page_table is None or slots in PAGES):
        library.call("decode_attention", tensors, q.dtype, shape, params, scale=scale)
        return out
    added = q.new_empty(0, dtype=torch.float32) if sinks is None else sinks.contiguous()
    tree = q.new_empty(0, dtype=torch.int32) if mask is None else mask.contiguous()
    scalars = {"scale": scale, "window": window, "softcap": softcap}
    library.call_entry("decode_attention", "scored", (*tensors, added, tree), **scalars)
    return out


def _is_on_hopper(q: Tensor) -> bool:
    return library.capability_of(q) == (9, 0)


def is_for_prefill(new: int, keys: int, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether kernels of prefill_attention for few queries over many keys, which are for Hopper, are faster."""
    return new * heads > FEW_ROWS * max(1, kv_heads) and keys >= FEW_KEYS and head_dim in (64, 128)


def _attend_as_prompts(
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    longest: int,
    scale: float,
) -> None:
    """Calls the kernel of prefill_attention that is the fastest by models of the times. New tokens are causal queries, the last
    ones of their sequences' keys."""
    batch, new, heads, dim = q.shape
    shape = {"batch": batch, "seq_q": new, "seq_kv": longest}
    shape |= {"heads": heads, "kv_heads": keys.shape[2], "head_dim": dim}
    page = "none" if page_table is None else page_of_prefill(keys.shape[1])
    params = {"layout": "padded", "lengths": "halving", "lse": "no", "page": page, "call": "causal"}
    table = () if page_table is None else (page_table.contiguous(),)
    all_queries = q.new_empty(0, dtype=torch.int32)  # all sequences have as many
    tensors = (out, q.new_empty(0, dtype=torch.float32), q, *table, keys, values, all_queries, lengths)
    scalars = {"causal": True, "window": 0, "softcap": 0.0, "scale": scale}
    library.call("prefill_attention", tensors, q.dtype, shape, params, **scalars)


def _make(*given: Any) -> Tensor:
    """The result, not filled, for the arguments of the op."""
    k_cache, (page_table, scales), mask = given[1], given[4:6], given[7]
    contract = _contract_of(page_table, scales, mask)
    made: Tensor = contract.make(*given, v_dim=v_dim_of(given[0]))
    slots = k_cache.shape[1]
    if page_table is not None and not is_power_of_two(slots):
        raise contract.error("k_cache whose slots are a power of two", slots)
    return made


_decode_attention_op = library.define(
    "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, Tensor? page_table, Tensor? scales, "
    "Tensor? sinks, Tensor? mask, float scale, SymInt window, float softcap) -> Tensor",
    _decode_attention,
    _make,
)
