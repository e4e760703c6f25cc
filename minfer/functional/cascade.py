"""`merge_state`, the kernels of that op as a function of PyTorch, and `cascade_attention`, which calls it."""

from __future__ import annotations

from typing import Any

import torch

from minfer.functional import library
from minfer.functional.attention import attention
from minfer.functional.contract import Contract

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
PADDED = Contract(
    "merge_state",
    """
    a: float32 | float16 | bfloat16 (batch, seq, heads, head_dim)
    a_lse: float32 (batch, heads, seq)
    b: a (batch, seq, heads, head_dim)
    b_lse: float32 (batch, heads, seq)
    -> a (batch, seq, heads, head_dim)
    -> float32 (batch, heads, seq)
    """,
)
PACKED = Contract(
    "merge_state",
    """
    a: float32 | float16 | bfloat16 (tokens, heads, head_dim)
    a_lse: float32 (heads, tokens)
    b: a (tokens, heads, head_dim)
    b_lse: float32 (heads, tokens)
    -> a (tokens, heads, head_dim)
    -> float32 (heads, tokens)
    """,
)


@library.public
def merge_state(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> Pair:
    """Attention over two sets of keys from attention over each: the new tensors out, of a's shape and dtype, and lse.

    a, b: what `attention` returned for the same queries over the first keys and over the others: (batch, seq, heads,
        head_dim), or packed (tokens, heads, head_dim), float32, float16 or bfloat16.
    a_lse, b_lse: their log-sum-exps, float32 (batch, heads, seq), or (heads, tokens).

    lse is log(exp(a_lse) + exp(b_lse)), and out = exp(a_lse - lse) a + exp(b_lse - lse) b, with fp32 arithmetic and rounded
    once. Where a log-sum-exp is -inf, the values beside it are not used. Works under `torch.compile`. It has no backward:
    raises RuntimeError where one would be recorded. Raises ValueError for tensors that do not fit each other."""
    library.refuse_gradients("merge_state", a, a_lse, b, b_lse)
    return _merge_state_op(a, a_lse, b, b_lse)


@library.public
def cascade_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor | int,
    prefix_v: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | Pair | None = None,
    lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | Pair:
    """`attention` where all requests share their first keys, such as those of a system prompt, which are read once for all.

    q, k, v: as in `attention`, where k and v are each request's own keys and values, behind the shared ones.
    prefix_k, prefix_v: (prefix, kv_heads, head_dim) of the same dtype, the keys and values that each query of each request
        sees. With page_table, prefix_k is their number instead, a multiple of a page's slots, and prefix_v is left out.
    causal: a query sees its request's own keys up to its own position, and the prefix. A request has at least as many keys of
        its own as queries; with cu_seqlens this is not checked, because the host would have to wait for the device.
    window: as in `attention`, and only beside a page_table: each query sees another part of the prefix. So this is one call of
        `attention` over all pages, which reads the keys in the windows of each request, shared or not.
    page_table, lengths: as in `attention`, for a paged cache with the keys of the prefix and those behind it. lengths, int32
        (batch,), counts both. All requests have the same pages of the prefix; without a window those of the first request are
        read. q is (tokens, heads, head_dim) with cu_seqlens of the queries.
    softcap, scale, sinks, cu_seqlens, return_lse: as in `attention`.

    Without a window, three launches: the queries of all requests over the prefix, as one sequence; `attention` over their own
    keys; and `merge_state`. The results of the first two are rounded to q's dtype. With sinks, three more scale the result.
    Works under `torch.compile`. It has no backward: raises RuntimeError where one would be recorded. Raises ValueError for
    arguments that do not fit."""
    how: dict[str, Any] = {"softcap": softcap, "scale": scale, "return_lse": True}
    rows = q.flatten(0, -3)[None]
    if page_table is None:
        if window is not None:
            raise ValueError(
                f"minfer.cascade_attention takes a window beside a page_table only, got a window of {window}: put the prefix "
                "and the keys behind it into pages"
            )
        _check_prefix(q, k, v, prefix_k, prefix_v, causal)
        if lengths is not None:
            raise ValueError("minfer.cascade_attention takes lengths beside a page_table, got no page_table")
        assert isinstance(prefix_k, Tensor) and isinstance(prefix_v, Tensor)
        own = attention(q, k, v, causal=causal, cu_seqlens=cu_seqlens, **how)
        shared = attention(rows, prefix_k[None], prefix_v[None], **how)
    else:
        pages = _pages_of_prefix(q, k, prefix_k, prefix_v, cu_seqlens, lengths, page_table)
        assert isinstance(prefix_k, int) and lengths is not None
        if window is not None:
            how |= {"causal": causal, "sinks": sinks, "cu_seqlens": cu_seqlens, "return_lse": return_lse}
            return attention(q, k, v, window=window, lengths=lengths, page_table=page_table, **how)
        own = attention(
            q,
            k,
            v,
            causal=causal,
            cu_seqlens=cu_seqlens,
            lengths=lengths - prefix_k,
            page_table=page_table[:, pages:],
            **how,
        )
        counts = [torch.full((1,), count, dtype=torch.int32, device=q.device) for count in (rows.shape[1], prefix_k)]
        shared = attention(rows, k, v, lengths=(counts[0], counts[1]), page_table=page_table[:1, :pages], **how)
    if q.dim() == 3:
        out, lse = merge_state(shared[0][0], shared[1][0], *own)
    else:  # the log-sum-exps of the queries of all requests are read in place
        of_requests = shared[1][0].unflatten(1, q.shape[:2]).transpose(0, 1)
        out, lse = merge_state(shared[0].view(q.shape), of_requests, *own)
    if sinks is not None:
        out *= _kept(lse, sinks)
    return (out, lse) if return_lse else out


def _kept(lse: Tensor, sinks: Tensor) -> Tensor:
    """The share of a query's denominator that is not its head's sink, for each of its elements of out."""
    if sinks.shape != lse.shape[-2:-1] or sinks.dtype != torch.float32:
        raise ValueError(
            f"minfer.cascade_attention takes float32 sinks of ({lse.shape[-2]},), got {sinks.dtype} of {tuple(sinks.shape)}"
        )
    return (lse - sinks[:, None]).sigmoid_().transpose(-1, -2)[..., None]


def _check_prefix(
    q: Tensor, k: Tensor, v: Tensor, prefix_k: Tensor | int, prefix_v: Tensor | None, causal: bool
) -> None:
    if not isinstance(prefix_k, Tensor) or not isinstance(prefix_v, Tensor):
        raise TypeError(
            "minfer.cascade_attention takes tensors as prefix_k and prefix_v, or a number as prefix_k beside a page_table"
        )
    for name, x in (("k", k), ("v", v), ("prefix_k", prefix_k), ("prefix_v", prefix_v)):
        for what, wanted, got in (("on the device", q.device, x.device), ("of the dtype", q.dtype, x.dtype)):
            if wanted != got:
                raise ValueError(f"minfer.cascade_attention takes {name} {what} of q, {wanted}, got {got}")
    shape, other = tuple(prefix_k.shape), tuple(prefix_v.shape)
    if len(shape) != 3:
        raise ValueError(f"minfer.cascade_attention takes prefix_k of (prefix, kv_heads, head_dim), got {shape}")
    if shape != other:
        raise ValueError(f"minfer.cascade_attention takes prefix_v of prefix_k's shape, {shape}, got {other}")
    if k.dim() > 1 and shape[1] != k.shape[-2]:
        raise ValueError(
            f"minfer.cascade_attention takes prefix_k with the {k.shape[-2]} key-value heads of k, got {shape[1]}"
        )
    if causal and q.dim() == 4 and k.dim() == 4 and k.shape[1] < q.shape[1]:
        raise ValueError(
            f"minfer.cascade_attention takes at least as many keys of a request as its {q.shape[1]} queries, got {k.shape[1]}"
        )


def _pages_of_prefix(
    q: Tensor,
    k: Tensor,
    prefix: Tensor | int,
    prefix_v: Tensor | None,
    cu_seqlens: Tensor | Pair | None,
    lengths: Tensor | None,
    page_table: Tensor,
) -> int:
    """How many pages the prefix has."""
    if prefix_v is not None or not isinstance(prefix, int):
        raise TypeError(
            "minfer.cascade_attention takes the number of shared keys as prefix_k beside a page_table, and no prefix_v"
        )
    if q.dim() != 3 or not isinstance(cu_seqlens, Tensor) or lengths is None:
        raise ValueError(
            "minfer.cascade_attention takes, beside a page_table, q of (tokens, heads, head_dim), cu_seqlens of the queries "
            "and lengths of the keys"
        )
    if k.dtype != q.dtype:
        raise ValueError(f"minfer.cascade_attention takes k of the dtype of q, {q.dtype}, got {k.dtype}")
    slots = k.shape[1] if k.dim() == 4 else 0
    if slots < 1 or prefix < 0 or prefix % slots or page_table.dim() != 2 or prefix // slots > page_table.shape[1]:
        raise ValueError(
            f"minfer.cascade_attention takes a prefix of whole pages that the page_table has, got {prefix} keys in pages of "
            f"{slots} and a page_table of {tuple(page_table.shape)}"
        )
    return prefix // slots


def _fake(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> Pair:
    made: Pair = (PACKED if a.dim() == 3 else PADDED).make(a, a_lse, b, b_lse)
    return made


def _merge_state(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> Pair:
    out, lse = _fake(a, a_lse, b, b_lse)
    if not out.numel():
        return out, torch.logaddexp(a_lse, b_lse)
    values = [x[None] if x.dim() == 3 else x for x in (out, library.readable(a), library.readable(b))]
    of_values = [x[None] if x.dim() == 2 else x for x in (lse, _tokens_together(a_lse), _tokens_together(b_lse))]
    shape = dict(zip(("batch", "seq", "heads", "head_dim"), values[0].shape, strict=True))
    tensors = (values[0], of_values[0], values[1], of_values[1], values[2], of_values[2])
    library.call("merge_state", tensors, a.dtype, shape)
    return out, lse


def _tokens_together(lse: Tensor) -> Tensor:
    """The log-sum-exps themselves where those of a head are contiguous, else a copy."""
    return lse if lse.stride(-1) == 1 or lse.shape[-1] == 1 else lse.contiguous()


_merge_state_op = library.define(
    "merge_state(Tensor a, Tensor a_lse, Tensor b, Tensor b_lse) -> (Tensor, Tensor)", _merge_state, _fake
)
