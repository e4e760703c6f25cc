"""Draws arguments for rope, attention and caches, with a formula in PyTorch that says what is right, in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional as F

from tests.functional.draw import FLOATS, HALVES, Draw, Drawn, Tensor


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    start: int = 0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    places = torch.arange(q.shape[-3]) + start if positions is None else positions.long()
    half = cos.shape[1]

    def turn(x: Tensor) -> Tensor:
        c, s = cos[places][..., None, :], sin[places][..., None, :]
        rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
        a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
        a, b = a * c - b * s, b * c + a * s
        turned = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
        return torch.cat((turned, rest), -1)

    return turn(q), turn(k)


def draw_rope(at: Draw) -> Drawn:
    dtype, dim = at.choice(*FLOATS), 2 * at.size(1)
    lead = [at.size(), at.size()][at.choice(0, 1) :]
    longest, start = lead[-1] + 7, at.choice(0, 0, 5)
    given: dict[str, Any] = {
        name: at.floats(dtype, *lead, heads, dim) for name, heads in (("q", at.size()), ("k", at.size()))
    }
    given |= {name: at.floats(torch.float32, longest, at.choice(dim // 2, max(1, dim // 4))) for name in ("cos",)}
    given["sin"] = at.floats(torch.float32, *given["cos"].shape)
    if at.choice(True, False):
        given["positions"] = at.ints(0, longest, *lead)
    else:
        given["start"] = start
    return given | {"interleaved": at.choice(True, False)}, rope


def rope_(q: Tensor, k: Tensor, **others: Any) -> Any:
    turned = rope(q, k, **others)
    return (*turned, dict(zip("qk", turned, strict=True)))


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Of one sequence: (tokens, heads, head_dim)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    at = torch.arange(k.shape[0])[None] - (torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0])
    hidden = torch.zeros_like(at, dtype=torch.bool)
    if causal:
        hidden |= at > 0
    if window:
        hidden |= at.abs() >= window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1).nan_to_num(0)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, softcap: float | None,
    lengths: Any = None, cu_seqlens: Any = None, sinks: Tensor | None = None, page_table: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if scales is not None:
        k, v = k * scales[0], v * scales[1]
    if page_table is not None:
        k, v = (x[page_table.long()].flatten(1, 2) for x in (k, v))
        if cu_seqlens is not None:
            assert isinstance(lengths, Tensor)
            of_keys = lengths.tolist()
            k, v = (torch.cat([x[i, :n] for i, n in enumerate(of_keys)]) for x in (k, v))
            cu_seqlens, lengths = (cu_seqlens, torch.tensor([0, *itertools.accumulate(of_keys)])), None
    found = torch.zeros_like(q)
    options = (causal, q.shape[-1] ** -0.5, window, softcap, sinks)
    if cu_seqlens is not None:
        for (a, b), (c, d) in zip(*(itertools.pairwise(x.tolist()) for x in cu_seqlens), strict=True):
            found[a:b] = attend(q[a:b], k[c:d], v[c:d], *options)
        return found
    whole = ([q.shape[1]] * len(q), [k.shape[1]] * len(q))
    for i, (m, n) in enumerate(zip(*(whole if lengths is None else (x.tolist() for x in lengths)), strict=True)):
        found[i, :m] = attend(q[i, :m], k[i, :n], v[i, :n], *options)
    return found


def draw_attention(at: Draw) -> Drawn:
    dtype, batch, heads, dim = at.choice(*HALVES), at.choice(0, 1, 2, 3), at.choice(1, 2, 4), at.choice(64, 128)
    kv_heads, how = (
        at.choice(*[n for n in (1, 2, 4) if heads % n == 0]),
        at.choice("whole", "lengths", "packed", "pages"),
    )
    lead: list[tuple[int, ...]] = [(batch, at.size()), (batch, at.size(1))]
    given: dict[str, Any] = {"causal": at.choice(True, False), "window": at.choice(None, None, 1, 3, 7)}
    given["softcap"] = at.choice(None, None, 0.5)
    if how == "lengths":
        given["lengths"] = tuple(at.ints(0, longest + 1, batch) for _, longest in lead)
    elif how == "packed":
        ends = [[0, *itertools.accumulate(at.size() for _ in range(batch))] for _ in range(2)]
        given["cu_seqlens"] = tuple(torch.tensor(each).int() for each in ends)
        lead = [(each[-1],) for each in ends]
    elif how == "pages":
        slots, most = at.choice(1, 4, 16), at.size(1)
        given["page_table"] = at.ints(0, 5, batch, most)
        given["lengths"] = at.ints(0, most * slots + 1, batch)
        lead[1] = (5, slots)
        if batch and at.choice(True, False):
            ends = [0, *itertools.accumulate(at.size() for _ in range(batch))]
            given["cu_seqlens"], lead[0] = torch.tensor(ends).int(), (ends[-1],)
        else:
            given["lengths"] = at.ints(0, lead[0][1] + 1, batch), given["lengths"]
    given |= {"q": at.floats(dtype, *lead[0], heads, dim)}
    given["sinks"] = at.choice(None, None, at.floats(torch.float32, heads) * 3)
    stored = dtype
    if at.choice(True, False, False):
        stored, given["scales"] = torch.float8_e4m3fn, torch.tensor([0.5, 2.0])
    return given | {name: at.floats(stored, *lead[1], kv_heads, dim) for name in ("k", "v")}, attention


def cascade(
    q: Tensor, k: Tensor, v: Tensor, prefix_k: Tensor, prefix_v: Tensor, causal: bool, softcap: float | None,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """A request at a time, over the prefix and its own keys as one sequence."""
    found, options = torch.zeros_like(q), (causal, q.shape[-1] ** -0.5, None, softcap)

    def attend_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, torch.cat((prefix_k, k)), torch.cat((prefix_v, v)), *options)

    if cu_seqlens is not None:
        for (a, b), (c, d) in zip(*(itertools.pairwise(x.tolist()) for x in cu_seqlens), strict=True):
            found[a:b] = attend_to_all(q[a:b], k[c:d], v[c:d])
        return found
    for i in range(len(q)):
        found[i] = attend_to_all(q[i], k[i], v[i])
    return found


def draw_cascade(at: Draw) -> Drawn:
    dtype, batch, heads, dim = at.choice(*HALVES), at.choice(0, 1, 2, 3), at.choice(1, 2, 4), at.choice(64, 128)
    kv_heads = at.choice(*[n for n in (1, 2, 4) if heads % n == 0])
    given: dict[str, Any] = {"causal": at.choice(True, False), "softcap": at.choice(None, None, 0.5)}
    new = [(at.size(), at.size()) for _ in range(batch)]
    pairs = [(count, count + more if given["causal"] else more) for count, more in new]
    lead: list[tuple[int, ...]]
    if at.choice(True, False):
        ends = [[0, *itertools.accumulate(each)] for each in (zip(*pairs, strict=True) if pairs else ((), ()))]
        given["cu_seqlens"] = tuple(torch.tensor(each).int() for each in ends)
        lead = [(each[-1],) for each in ends]
    else:
        count, keys = pairs[0] if pairs else (3, 5)
        lead = [(batch, count), (batch, keys)]
    given |= {"q": at.floats(dtype, *lead[0], heads, dim)}
    given |= {name: at.floats(dtype, *lead[1], kv_heads, dim) for name in ("k", "v")}
    prefix = at.size()
    return given | {name: at.floats(dtype, prefix, kv_heads, dim) for name in ("prefix_k", "prefix_v")}, cascade


def merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(a_lse, b_lse)
    of_a, of_b = ((each - lse).exp().nan_to_num(0.0).transpose(-1, -2)[..., None] for each in (a_lse, b_lse))
    return of_a * a + of_b * b, lse


def draw_merge(at: Draw) -> Drawn:
    dtype, seq, heads, dim = at.choice(*FLOATS), at.size(), at.size(), at.size()
    lead = at.choice((), (at.choice(0, 1, 2, 3),))
    given: dict[str, Any] = {}
    for name in ("a", "b"):
        given[name] = at.floats(dtype, *lead, seq, heads, dim)
        lse = at.floats(torch.float32, *lead, heads, seq) * 3
        given[f"{name}_lse"] = lse.masked_fill(lse > 2.5, -torch.inf)
    return given, merge


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    found, new = q.new_zeros((*q.shape[:3], v_cache.shape[3])), q.shape[1]
    if scales is not None:
        k_cache, v_cache = k_cache * scales[0], v_cache * scales[1]
    if page_table is not None:
        k_cache, v_cache = (x[page_table.long()].flatten(1, 2) for x in (k_cache, v_cache))
    for b, length in enumerate(lengths.tolist()):
        for i in range(max(0, new - length), new):
            seen: slice | list[int] = slice(length - new + i + 1)
            if mask is not None:
                fresh = range(length - new, length)
                of_tree = [j for j, sees in zip(fresh, mask[b, i].tolist(), strict=True) if sees and j >= 0]
                seen = [*range(length - new), *of_tree]
            k, v = (x[b, seen] for x in (k_cache, v_cache))
            options = (True, scale or q.shape[-1] ** -0.5, window, softcap, sinks)
            found[b, i : i + 1] = attend(q[b, i : i + 1], k, v, *options)
    return found


def draw_cache(at: Draw, batch: int, page: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """The first two sizes of a cache, contiguous or in pages, with the lengths and perhaps the table of its pages."""
    if at.choice(True, False):
        slots = at.size(1)
        return (batch, slots), {"lengths": at.ints(0, slots + 1, batch)}
    most = at.choice(1, 2, 3)
    pages = batch * most + at.choice(0, 2)
    table = torch.tensor(at.rng.sample(range(pages), batch * most), dtype=torch.int32).reshape(batch, most)
    return (pages, page), {"lengths": at.ints(0, most * page + 1, batch), "page_table": table}


def draw_decode(at: Draw) -> Drawn:
    dtype, batch, heads, dim = (
        at.choice(*HALVES),
        at.choice(0, 1, 2, 3),
        at.choice(1, 2, 4),
        at.choice(64, 96, 128, 192),
    )
    kv_heads = at.choice(*[n for n in (1, 2, 4) if heads % n == 0])
    lead, given = draw_cache(at, batch, at.choice(1, 4, 16, 64))
    new = at.choice(1, 1, 2, 3, 16)
    given["q"] = at.floats(dtype, batch, new, heads, dim)
    if at.choice(True, False):
        given |= {"window": at.choice(None, 1, 3, 7, 40), "softcap": at.choice(None, 0.5)}
        if given["window"] is None:
            given["mask"] = at.choice(None, at.ints(0, 2, batch, new, new).bool())
        given["sinks"] = at.choice(None, at.floats(torch.float32, heads) * 3)
    stored = dtype
    if at.choice(True, False, False):
        stored, given["scales"] = torch.float8_e4m3fn, torch.tensor([0.5, 2.0])
    caches = {"k_cache": dim, "v_cache": 128 if dim == 192 else dim}
    return given | {name: at.floats(stored, *lead, kv_heads, of) for name, of in caches.items()}, decode


def mla(q: Tensor, cache: Tensor, **others: Tensor) -> Tensor:
    k = cache[:, :, None]
    return decode(q, k, k, scale=192**-0.5, **others)[..., :512]


def draw_mla(at: Draw) -> Drawn:
    dtype, batch = at.choice(*HALVES), at.choice(0, 1, 2)
    lead, given = draw_cache(at, batch, 64)
    given["q"] = at.floats(dtype, batch, at.choice(1, 2), at.choice(1, 3, 16), 576)
    return given | {"cache": at.floats(dtype, *lead, 576)}, mla


def append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, where: Tensor, scales: Tensor | None = None) -> Any:
    slots, changed = k_cache.shape[1], {}
    if scales is not None:
        k, v = ((x / scale).to(torch.float8_e4m3fn).double() for x, scale in zip((k, v), scales, strict=True))
    for name, cache, new in (("k_cache", k_cache, k), ("v_cache", v_cache, v)):
        changed[name] = flat = cache.clone()
        for i, place in enumerate(where.tolist()):
            if new.dim() == 3 and 0 <= place < flat.shape[0] * slots:
                flat[place // slots, place % slots] = new[i]
            for t in range(new.shape[1] if new.dim() == 4 else 0):
                if 0 <= place + t < slots:
                    flat[i, place + t] = new[i, t]
    return (changed,)


def draw_append(at: Draw) -> Drawn:
    dtype, blocks, slots, tail = at.choice(*FLOATS), at.size(), at.choice(16, 64), (at.size(1), at.choice(8, 16, 64))
    given = {name: at.floats(dtype, blocks, slots, *tail) for name in ("k_cache", "v_cache")}
    if at.choice(True, False):
        tokens = min(at.size(), blocks * slots)
        places = at.rng.sample(range(-1, blocks * slots + 1), tokens)
        given |= {name: at.floats(dtype, tokens, *tail) for name in "kv"}
    else:
        places = [at.rng.randint(0, slots) for _ in range(blocks)]
        new = at.choice(1, 2, 5)
        given |= {name: at.floats(dtype, blocks, new, *tail) for name in "kv"}
    if at.choice(True, False, False):  # a power of two: the quotient is exact, as in a kernel that multiplies
        given |= {name: given[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
        given["scales"] = torch.tensor([0.5, 2.0])
    return given | {"where": torch.tensor(places, dtype=torch.int64)}, append


def rope_append(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, where: Tensor, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 1e-6,
) -> Any:  # fmt: skip
    kv_heads = k_cache.shape[2]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    if q_weight is not None and k_weight is not None:
        q, k = F.rms_norm(q, q.shape[-1:], q_weight, eps), F.rms_norm(k, k.shape[-1:], k_weight, eps)
    q, k = rope(q, k, cos, sin, positions)
    (written,) = append(k_cache, v_cache, k, v, where)
    return q, written


def draw_rope_append(at: Draw) -> Drawn:
    dtype, dim, kv_heads, blocks, slots = at.choice(*FLOATS), 2 * at.size(1), at.size(), at.size(1), at.choice(16, 64)
    tokens, longest, half = min(at.size(), blocks * slots), at.size(1), at.choice(dim // 2, max(1, dim // 4))
    given: dict[str, Any] = {
        "qkv": at.floats(dtype, tokens, at.size() + 2 * kv_heads, dim),
        **{name: at.floats(dtype, blocks, slots, kv_heads, dim) for name in ("k_cache", "v_cache")},
        "positions": at.ints(0, longest, tokens),
        "where": torch.tensor(at.rng.sample(range(-1, blocks * slots + 1), tokens), dtype=torch.int64),
        **{name: at.floats(torch.float32, longest, half) for name in ("cos", "sin")},
    }
    if at.choice(True, False):
        given |= {"q_weight": at.floats(dtype, dim), "k_weight": at.floats(dtype, dim), "eps": at.choice(1e-6, 0.5)}
    return given, rope_append
