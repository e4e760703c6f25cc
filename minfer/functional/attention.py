"""`attention`: the kernels of prefill_attention as a function of PyTorch, `torch.ops.minfer.attention`."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from minfer.functional import library
from minfer.functional.attention_times import DECODE, Problem, fastest
from minfer.functional.contract import Contract
from minfer.functional.decode_attention import MOST_NEW, decode_attention, is_for_prefill, v_dim_of
from minfer.functional.pages import is_power_of_two, page_of_prefill
from minfer.ops.attention_reference import LATENT

Tensor = torch.Tensor
Lengths = Tensor | tuple[Tensor, Tensor]
HEAD_DIMS = (64, 96, 128, 192, 256)
FEW = 2048  # keys that a query sees: up to here the kernel with sinks is the fastest
DEVICES_THAT_DIVIDE = ("cuda",)  # where decode_attention divides keys among thread blocks


def _contract(packed: bool, paged: bool, quantised: bool) -> Contract:
    stored = "float8_e4m3fn" if quantised else "q"
    rows = "tokens_q" if packed else "batch, seq_q"
    of_kv = "pages, slots" if paged else "tokens_kv" if packed else "batch, seq_kv"
    counts = "cu_seqlens: int32 (ends)" if packed else "lengths: int32 (batch)"
    return Contract(
        "attention",
        f"""
        q: float16 | bfloat16 ({rows}, heads, head_dim)
        k: {stored} ({of_kv}, kv_heads, head_dim)
        v: {stored} ({of_kv}, kv_heads, v_dim)
        sinks: float32 (heads)
        {counts}
        {"lengths: int32 (batch)" if paged else counts}
        page_table: int32 (batch, most_pages)
        scales: float32 (2)
        """,
        head_dim=HEAD_DIMS,
        kv_heads="heads",
        ends=1,
    )


CONTRACTS = {how: _contract(*how) for how in itertools.product((False, True), repeat=3)}


@library.public
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Lengths | None = None,
    lengths: Lengths | None = None,
    page_table: Tensor | None = None,
    scales: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q kᵀ) v for each head, a new contiguous tensor of (batch, seq_q, heads, v_dim).

    q: (batch, seq_q, heads, head_dim), float16 or bfloat16; head_dim is 64, 96, 128, 192 or 256.
    k, v: (batch, seq_kv, kv_heads, head_dim) of the same dtype or, with `scales`, float8_e4m3fn; v with v_dim, which is
        head_dim, or 128 where that is 192 (DeepSeek's prefill). kv_heads divides heads: query head h reads key-value head
        h // (heads / kv_heads).
    cu_seqlens: int32 (batch + 1,), cumulative lengths from 0, where q is (tokens, heads, head_dim) and k and v likewise, one
        sequence after the other; a pair of them where queries and keys differ in length. For tokens behind the
        last sequence out is not written.
    lengths: int32 (batch,), how many tokens of each sequence of a padded batch are used, or a pair for queries and keys.
        Tokens behind them are not used, and out is 0 there. With cu_seqlens and a page_table: the keys of each sequence.
    page_table: int32 (batch, most pages), for keys and values in a cache that `kv_append_` or `rope_append_` writes: k is
        (pages, slots, kv_heads, head_dim) and v likewise, the slots of a page a power of two. Position j of sequence b is slot
        j % slots of page page_table[b, j // slots]. q is (tokens, heads, head_dim) with cu_seqlens of the queries and lengths
        of the keys, or padded with a pair of lengths. A sequence's new tokens are the last ones of its keys, so that a
        prompt can come in chunks. Entries behind a sequence's last page are not read. On sm_90, a long prompt first copies the
        keys and values to scratch memory of at most 512 MiB.
    scales: float32 (2,), the factor of k and the factor of v, for k and v in fp8.
    causal: a query sees the keys up to its own position. The last query of a sequence is at the position of its last key:
        with more keys than queries, the queries follow a cached prefix.
    window: a query sees only keys less than `window` positions away, its own among them.
    softcap: scores become softcap * tanh(score / softcap).
    sinks: float32 (heads,), a score without a value for each query head: it adds to the denominator, but not to the
        log-sum-exp. On sm_90 without a page_table or scales, with heads of 64 or 128 and at most 2048 keys, or a window of
        at most 2048, one kernel applies them; elsewhere three more launches scale out, which is then rounded twice.
    scale: 1 / sqrt(head_dim) unless given.
    return_lse: return also the log-sum-exp of each query's scores, float32 (batch, heads, seq_q), or (heads, tokens).

    A query that sees no key has an out of 0 and a log-sum-exp of -inf. Sums are fp32 and out is rounded once. The host does
    not check lengths, because it would have to wait for the device: lengths out of range are clamped, and nothing is read out
    of bounds. Tensors may be parts of one projection: rows that start at multiples of 16 bytes are read in place, others are
    copied first. `best` picks the kernel, which is compiled at its first call. On a GPU, `attention` calls
    `decode_attention` for up to 16 causal queries or a single one, where models expect it to be the fastest, if v_dim is
    not 192, and there are no sinks, lengths, cu_seqlens, page_table, scales or return_lse. Works under `torch.compile`. It
    has no backward: raises RuntimeError where one would be recorded. Raises ValueError for arguments that do not fit."""
    library.refuse_gradients("attention", q, k, v, sinks, scales)
    if scales is None and k.dtype == torch.float8_e4m3fn:
        raise ValueError("minfer.attention takes scales beside k and v of float8_e4m3fn, got None")
    if page_table is not None:
        if (
            lengths is None
            or isinstance(cu_seqlens, tuple | list)
            or (cu_seqlens is not None and not isinstance(lengths, Tensor))
        ):
            raise ValueError(
                "minfer.attention takes lengths of queries and keys beside a page_table, or cu_seqlens of packed queries "
                "and lengths of keys, got " + _what_is_given(cu_seqlens, lengths)
            )
    elif cu_seqlens is not None and lengths is not None:
        raise ValueError(
            "minfer.attention takes cu_seqlens, for packed sequences, or lengths, for padded ones, got both"
        )
    if (cu_seqlens is not None) != (q.dim() == 3):
        wanted = (
            "(tokens, heads, head_dim) with cu_seqlens" if cu_seqlens is not None else "(batch, seq, heads, head_dim)"
        )
        raise ValueError(f"minfer.attention takes q of {wanted}, got {tuple(q.shape)}")
    if window is not None or softcap is not None or scale is not None:
        for name, value in (("window", window), ("softcap", softcap), ("scale", scale)):
            if value is not None and not value > 0:
                raise ValueError(f"minfer.attention takes a {name} above 0, or None, got {value}")
    if cu_seqlens is not None and lengths is not None:
        of_q, of_kv = _pair("cu_seqlens", cu_seqlens)[0], _pair("lengths", lengths)[1]
    else:
        of_q, of_kv = _pair("cu_seqlens", cu_seqlens) if lengths is None else _pair("lengths", lengths)
    found: tuple[Tensor, Tensor] = _attention_op(
        q, k, v, of_q, of_kv, sinks, page_table, scales, causal, window or 0, softcap or 0.0, scale or 0.0, return_lse
    )
    return found if return_lse else found[0]


def _what_is_given(cu_seqlens: Lengths | None, lengths: Lengths | None) -> str:
    pairs = [(name, x) for name, x in (("cu_seqlens", cu_seqlens), ("lengths", lengths)) if x is not None]
    return " and ".join(f"{'' if isinstance(x, Tensor) else 'a pair of '}{name}" for name, x in pairs) or "neither"


def _pair(name: str, given: Lengths | None) -> tuple[Tensor | None, Tensor | None]:
    if given is None or isinstance(given, Tensor):
        return given, given
    if not isinstance(given, tuple | list) or [isinstance(x, Tensor) for x in given] != [True, True]:
        raise TypeError(f"minfer.attention takes a tensor as {name}, or a pair of them, got {given!r}")
    of_q, of_kv = given
    return of_q, of_kv


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_seqlens: Tensor | None,
    kv_seqlens: Tensor | None,
    sinks: Tensor | None,
    page_table: Tensor | None,
    scales: Tensor | None,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    out, lse = _make(return_lse, q, k, v, q_seqlens, kv_seqlens, sinks, page_table, scales)
    if not q.numel():
        return out, lse
    if not k.numel() or (page_table is not None and not page_table.numel()):
        return out.zero_(), lse.fill_(-torch.inf)
    packed, nothing = q.dim() == 3, q.new_empty(0, dtype=torch.int32)
    batch = 1 if q_seqlens is None else len(q_seqlens) - packed
    batch = max(1, batch) if packed else q.shape[0]
    longest = [
        -(-x.shape[-3] // batch) if packed else x.shape[1] for x in (q, k)
    ]  # about, where the host does not know
    if page_table is not None:
        longest[1] = k.shape[1] * page_table.shape[1]
    plain = page_table is None and scales is None
    found, fused = lse, sinks is not None and plain and _has_sinks(q, longest[1], window)
    if sinks is not None and not (fused or return_lse):
        lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    heads, dim = q.shape[-2:]
    seen = min(longest[1], window + longest[0]) if window and plain else longest[1]  # keys, which the choice counts
    shape = {"batch": batch, "seq_q": longest[0], "seq_kv": seen}
    shape |= {"heads": heads, "kv_heads": k.shape[-2], "head_dim": dim}
    if v.shape[-1] != dim:
        shape["v_dim"] = v.shape[-1]
    params = {"layout": "packed" if packed else "padded", "lengths": "full" if q_seqlens is None else "halving"}
    params["lse"] = "yes" if lse.numel() else "no"
    if page_table is not None:
        params["page"] = page_of_prefill(k.shape[1])
    if scales is not None:
        params["quant"] = "fp8"
    if (
        call := "narrow"
        if window and softcap
        else "window"
        if window
        else "softcap"
        if softcap
        else ""
        if causal
        else "full"
    ):
        params["call"] = call
    is_usual = q_seqlens is kv_seqlens is sinks is page_table is scales is None and not return_lse
    if is_usual and _is_for_decode_attention(q, k, v, causal, window):
        library.note("prefill_attention", q.dtype, shape, params, "decode_attention, by models of the times")
        ends = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
        divided = decode_attention(q, k, v, ends, scale=scale or None, window=window or None, softcap=softcap or None)
        return divided, lse
    seqlens = [nothing if x is None else x.contiguous() for x in (q_seqlens, kv_seqlens)]
    rows, keys, values = map(library.readable, (q, k, v))
    table = () if plain else (nothing.view(batch, 0) if page_table is None else page_table.contiguous(),)
    factors = () if scales is None else (scales.contiguous(),)
    tensors = (out, lse, rows, *table, keys, values, *seqlens, *factors)
    scalars: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
    if sinks is not None and fused:
        library.call_entry("prefill_attention", "sinks", (*tensors, sinks.contiguous()), **scalars)
        return out, found
    library.call("prefill_attention", tensors, q.dtype, shape, params, **scalars)
    if sinks is not None:  # out without a sink, times e^lse / (e^lse + e^sink)
        out.mul_((lse - sinks[:, None]).sigmoid_().transpose(-1, -2)[..., None])
    return out, found


def _is_for_decode_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int) -> bool:
    """Whether decode_attention takes this problem, and is the fastest by models of the times. It is causal; a single query
    sees all keys either way."""
    new, (keys, kv_heads) = q.shape[1], k.shape[1:3]
    is_hopper = library.capability_of(q) == (9, 0)
    if (
        new > MOST_NEW
        or (is_hopper and is_for_prefill(new, keys, q.shape[2], kv_heads, q.shape[3]))
        or not (causal or new == 1)
        or v.shape[3] != v_dim_of(q)
        or library.device_of(q).type not in DEVICES_THAT_DIVIDE
    ):
        return False
    seen = min(keys, window + new) if window else keys
    of = Problem(q.shape[0], new, seen, q.shape[2], kv_heads, q.shape[3], v.shape[3], causal)
    return fastest(of, True, hopper=is_hopper) == DECODE


def _has_sinks(q: Tensor, keys: int, window: int) -> bool:
    """Whether a kernel with sinks takes q, and is faster than three launches behind one without: it is for few keys."""
    few = keys <= FEW or 0 < window <= FEW
    return few and q.shape[-1] in (64, 128) and library.capability_of(q) == (9, 0)


def _fake(*given: Any) -> tuple[Tensor, Tensor]:
    return _make(given[-1], *given[:8])


def _make(
    return_lse: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_seqlens: Tensor | None,
    kv_seqlens: Tensor | None,
    sinks: Tensor | None,
    page_table: Tensor | None,
    scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The results, not filled."""
    packed, paged = q.dim() == 3, page_table is not None
    contract = CONTRACTS[packed, paged, scales is not None]
    latent = (*q.shape[-1:], *v.shape[-1:]) == LATENT
    v_dim = LATENT[1] if latent else q.shape[-1] if q.dim() else 0
    known = {"batch": q_seqlens.numel() - 1} if packed and paged and q_seqlens is not None else {}
    contract.check(q, k, v, sinks, q_seqlens, kv_seqlens, page_table, scales, v_dim=v_dim, **known)
    if (q_seqlens is None) != (kv_seqlens is None) or (packed and q_seqlens is None):
        raise contract.error(f"{'cu_seqlens' if packed else 'lengths'} of both queries and keys", "None")
    if paged and (kv_seqlens is None or not is_power_of_two(k.shape[1])):
        wanted = "lengths of keys beside a page_table" if kv_seqlens is None else "k whose slots are a power of two"
        raise contract.error(wanted, "None" if kv_seqlens is None else k.shape[1])
    *lead, seq, heads, _ = q.shape
    sizes = (*lead, heads, seq) if return_lse else (0,)
    return q.new_empty((*lead, seq, heads, v.shape[-1])), q.new_empty(sizes, dtype=torch.float32)


_attention_op = library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? q_seqlens, Tensor? kv_seqlens, Tensor? sinks, "
    "Tensor? page_table, Tensor? scales, bool causal, SymInt window, float softcap, float scale, bool return_lse) "
    "-> (Tensor, Tensor)",
    _attention,
    _fake,
)
