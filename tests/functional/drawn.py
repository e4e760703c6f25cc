"""Draws arguments for each public function from a seed, with a formula in PyTorch that says what is right, in fp64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

Tensor = torch.Tensor
Reference = Callable[..., Any]  # takes the same arguments as the function, floats as fp64
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)


class Draw:
    """Draws from one seed."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.torch = torch.Generator().manual_seed(self.rng.getrandbits(32))

    def size(self, least: int = 0) -> int:
        return max(least, self.rng.choice((0, 1, 1, 2, 3, 5, 7, 8, 9, 16, 17, 24, 33, 64)))

    def choice(self, *values: Any) -> Any:
        return self.rng.choice(values)

    def floats(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self.torch) * 2 - 1).to(dtype)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """From low up to but not including high."""
        return torch.randint(low, max(high, low + 1), shape, generator=self.torch, dtype=dtype)

    def laid_out(self, x: Tensor) -> Tensor:
        """The same values elsewhere: dimensions in any order, gaps between them, an offset; NaN or large numbers around."""
        order = list(range(x.dim()))
        if self.rng.random() < 0.4:
            self.rng.shuffle(order)
        strides, stride = [0] * x.dim(), self.choice(1, 1, 1, 1, 2, 3)
        for dim in reversed(order):
            strides[dim] = self.choice(0, 1, 3, 1 << 40) if x.shape[dim] == 1 else stride
            if x.shape[dim] != 1:
                stride = stride * max(1, x.shape[dim]) + self.choice(0, 0, 0, 1, 3, 8)
        offset = self.choice(0, 0, 0, 1, 3, 8)
        around = 123 if not x.dtype.is_floating_point else torch.nan
        room = torch.full((offset + stride * 2 + 8,), around).to(x.dtype)
        return (
            room.as_strided(x.shape, strides, offset).copy_(x)
            if x.numel()
            else room.as_strided(x.shape, strides, offset)
        )


Drawn = tuple[dict[str, Any], Reference]


def product(
    names: tuple[str, ...], biases: tuple[str, ...], formula: Reference, rows: bool = False
) -> Callable[[Draw], Drawn]:
    def draw(at: Draw) -> Drawn:
        dtype, m, n, k = at.choice(*HALVES), at.size(), at.size(), at.size()
        x, *weights = names
        lead = (at.size(), m) if rows and at.choice(True, False) else (m,)
        given = {x: at.floats(dtype, *lead, k)} | {name: at.floats(dtype, k, n) for name in weights}
        return given | {name: at.floats(dtype, n) for name in biases}, formula

    return draw


def rows_of(
    names: tuple[str, ...], lasts: tuple[str, ...], formula: Reference, dtypes: tuple[torch.dtype, ...] = FLOATS
):
    def draw(at: Draw) -> Drawn:
        dtype, shape = at.choice(*dtypes), [at.size() for _ in range(at.choice(1, 2, 3))]
        given = {name: at.floats(dtype, *shape) for name in names}
        return given | {name: at.floats(dtype, shape[-1]) for name in lasts}, formula

    return draw


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None) -> Any:
    total = x if residual is None else x + residual
    y = total / (total.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return y if residual is None else (y, {"residual": total})


def draw_rms(at: Draw) -> Drawn:
    given, formula = rows_of(("x", "residual") if at.choice(True, False) else ("x",), ("weight",), rms)(at)
    return given, formula


def softmax(x: Tensor, mask: Tensor | None = None) -> Tensor:
    if mask is None:
        return x.softmax(-1)
    if mask.dtype.is_floating_point:
        return (x + mask).softmax(-1)
    outside = torch.arange(x.shape[-1]) >= mask[..., None]
    return x.masked_fill(outside, -torch.inf).softmax(-1).masked_fill(outside & (mask > 0)[..., None], 0)


def draw_softmax(at: Draw) -> Drawn:
    given, formula = rows_of(("x",), (), softmax)(at)
    shape, kind = given["x"].shape, at.choice("none", "added", "lengths")
    if kind == "added":
        given["mask"] = at.floats(given["x"].dtype, shape[-1])
    elif kind == "lengths":
        given["mask"] = at.ints(1, shape[-1] + 2, *shape[:-1])
    return given, formula


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    found = (
        table[ids.long().clamp(0, max(0, len(table) - 1))]
        if len(table)
        else table.new_zeros(*ids.shape, table.shape[1])
    )
    return found.masked_fill(((ids < 0) | (ids >= len(table)))[..., None], torch.nan)


def draw_embedding(at: Draw) -> Drawn:
    vocab, shape = at.size(1), [at.size() for _ in range(at.choice(0, 1, 2))]
    ids = at.ints(-1, vocab + 1, *shape, dtype=at.choice(torch.int32, torch.int64))
    return {"ids": ids, "table": at.floats(at.choice(*FLOATS), vocab, at.size())}, embedding


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
    lengths: tuple[Tensor, Tensor] | None = None, cu_seqlens: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
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
    kv_heads, how = at.choice(*[n for n in (1, 2, 4) if heads % n == 0]), at.choice("whole", "lengths", "packed")
    lead: list[tuple[int, ...]] = [(batch, at.size()), (batch, at.size(1))]
    given: dict[str, Any] = {"causal": at.choice(True, False), "window": at.choice(None, None, 1, 3, 7)}
    given["softcap"] = at.choice(None, None, 0.5)
    if how == "lengths":
        given["lengths"] = tuple(at.ints(0, longest + 1, batch) for _, longest in lead)
    elif how == "packed":
        ends = [[0, *itertools.accumulate(at.size() for _ in range(batch))] for _ in range(2)]
        given["cu_seqlens"] = tuple(torch.tensor(each).int() for each in ends)
        lead = [(each[-1],) for each in ends]
    given |= {"q": at.floats(dtype, *lead[0], heads, dim)}
    given["sinks"] = at.choice(None, None, at.floats(torch.float32, heads) * 3)
    return given | {name: at.floats(dtype, *lead[1], kv_heads, dim) for name in ("k", "v")}, attention


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
) -> Tensor:
    found, new = torch.zeros_like(q), q.shape[1]
    if page_table is not None:
        k_cache, v_cache = (x[page_table.long()].flatten(1, 2) for x in (k_cache, v_cache))
    for b, length in enumerate(lengths.tolist()):
        for i in range(max(0, new - length), new):
            k, v = (x[b, : length - new + i + 1] for x in (k_cache, v_cache))
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
    dtype, batch, heads, dim = at.choice(*HALVES), at.choice(0, 1, 2, 3), at.choice(1, 2, 4), at.choice(64, 128)
    kv_heads = at.choice(*[n for n in (1, 2, 4) if heads % n == 0])
    lead, given = draw_cache(at, batch, at.choice(16, 64))
    given["q"] = at.floats(dtype, batch, at.choice(1, 1, 2, 3), heads, dim)
    if at.choice(True, False):
        given |= {"window": at.choice(None, 1, 3, 7, 40), "softcap": at.choice(None, 0.5)}
        given["sinks"] = at.choice(None, at.floats(torch.float32, heads) * 3)
    return given | {name: at.floats(dtype, *lead, kv_heads, dim) for name in ("k_cache", "v_cache")}, decode


def mla(q: Tensor, cache: Tensor, **others: Tensor) -> Tensor:
    k = cache[:, :, None]
    return decode(q, k, k, scale=192**-0.5, **others)[..., :512]


def draw_mla(at: Draw) -> Drawn:
    dtype, batch = at.choice(*HALVES), at.choice(0, 1, 2)
    lead, given = draw_cache(at, batch, 64)
    given["q"] = at.floats(dtype, batch, at.choice(1, 2), at.choice(1, 3, 16), 576)
    return given | {"cache": at.floats(dtype, *lead, 576)}, mla


def append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Any:
    slots, changed = k_cache.shape[1], {}
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


def sums(x: Tensor, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    found = torch.zeros_like(x)
    if lengths is not None:
        for b, length in enumerate(lengths.tolist()):
            found[b, :length] = x[b, :length].sum()
    else:
        ends = cu_seqlens.tolist() if cu_seqlens is not None else []
        for begin, end in itertools.pairwise(ends):
            found[begin:end] = x[begin:end].sum()
    return found


def draw_sums(at: Draw) -> Drawn:
    dtype = at.choice(torch.float32, torch.bfloat16)
    if at.choice(True, False):
        batch, longest = at.size(), at.size()
        return {"x": at.floats(dtype, batch, longest), "lengths": at.ints(0, longest + 1, batch)}, sums
    lengths = [at.size() for _ in range(at.choice(1, 2, 5))]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return {"x": at.floats(dtype, sum(lengths) + at.choice(0, 3)), "cu_seqlens": ends}, sums


def route(logits: Tensor, k: int, normalize: bool) -> Any:
    weights, _ = logits.softmax(-1).topk(k, -1)
    return (weights / weights.sum(-1, keepdim=True) if normalize else weights,)


def draw_route(at: Draw) -> Drawn:
    experts = at.size(1)
    given = {"logits": at.floats(at.choice(torch.float32, torch.bfloat16), at.size(), experts)}
    return given | {"k": at.rng.randint(1, min(experts, 8)), "normalize": at.choice(True, False)}, route


def experts(x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for weight, expert in zip(weights[t], indices[t].tolist(), strict=True):
            if 0 <= expert < len(down):
                gate, up = (gate_up[expert] @ x[t]).chunk(2)
                y[t] += weight * (down[expert] @ (F.silu(gate) * up))
    return y


def draw_experts(at: Draw) -> Drawn:
    dtype, tokens, hidden, ffn, count, k = at.choice(*HALVES), at.size(), at.size(1), at.size(1), at.choice(1, 3, 8), 2
    given = {"x": at.floats(dtype, tokens, hidden), "weights": at.floats(torch.float32, tokens, k)}
    given |= {"indices": at.ints(-1, count + 1, tokens, k), "gate_up": at.floats(dtype, count, 2 * ffn, hidden)}
    return given | {"down": at.floats(dtype, count, hidden, ffn)}, experts


def weights_of(w: Tensor, format: str, scales: Tensor | None = None, zeros: Tensor | None = None, **_: Any) -> Tensor:
    """What quantised weights stand for, (n, k)."""
    if scales is None:  # a block of 32: its scale, then its values
        scale, values = w.unflatten(1, (-1, 34 if format == "q8_0" else 18)).split(
            [2, 32 if format == "q8_0" else 16], -1
        )
        if format == "q8_0":
            values = values.view(torch.int8).double()
        else:
            values = torch.cat((values & 15, values >> 4), -1).double() - 8
        return (scale.contiguous().view(torch.float16).double() * values).flatten(1)
    if format == "fp8":
        return w.double() * scales[:, None]
    each = lambda x: x.repeat_interleave(int(format.removeprefix("int4_g")), 1)
    return (torch.stack((w & 15, w >> 4), -1).flatten(-2).double() - (8 if zeros is None else each(zeros))) * each(
        scales
    )


def draw_weights(at: Draw) -> Drawn:
    n, blocks, dtype = at.size(), at.choice(1, 2, 3), at.choice(*HALVES)
    format = at.choice("int4_g64", "int4_g128", "fp8", "q8_0", "q4_0")
    given: dict[str, Any] = {"format": format, "dtype": dtype}
    if format == "fp8":
        k = at.choice(32, 64, 160)
        return given | {"w": at.floats(torch.float8_e4m3fn, n, k), "scales": at.floats(torch.float32, n)}, weights_of
    if format.startswith("q"):
        scale = at.floats(torch.float16, n, blocks, 1).view(torch.uint8).reshape(n, blocks, 2)
        values = at.ints(0, 256, n, blocks, 32 if format == "q8_0" else 16, dtype=torch.uint8)
        return given | {"w": torch.cat((scale, values), -1).flatten(1)}, weights_of
    group = int(format.removeprefix("int4_g"))
    given["w"] = at.ints(0, 256, n, group * blocks // 2, dtype=torch.uint8)
    names = ("scales", "zeros") if at.choice(True, False) else ("scales",)
    return given | {name: at.floats(dtype, n, blocks) for name in names}, weights_of


def draw_quant(at: Draw) -> Drawn:
    given, _ = draw_weights(at)
    k = weights_of(**given).shape[1]
    given["x"] = at.floats(given["dtype"], *[at.size() for _ in range(at.choice(1, 2))], k)
    return given, lambda x, **others: x @ weights_of(**others).t()


def draw_sample(at: Draw) -> Drawn:
    rows, vocab = at.size(), at.size(1)
    logits = at.floats(at.choice(torch.float32, torch.bfloat16), rows, vocab)
    return {"logits": logits, "temperature": 0.0}, lambda logits, temperature: logits.argmax(-1)


DRAWS: Mapping[str, Callable[[Draw], Drawn]] = {
    "attention": draw_attention,
    "axpby": rows_of(("a", "b"), (), lambda a, b: a + b, (torch.float32,)),
    "decode_attention": draw_decode,
    "dequant": draw_weights,
    "embedding": draw_embedding,
    "gated_unit": product(
        ("x", "w1", "w2"), ("b1", "b2"), lambda x, w1, b1, w2, b2: (x @ w1 + b1).sigmoid() * (x @ w2 + b2), True
    ),
    "gemm_bias_gelu": product(("a", "b"), ("bias",), lambda a, b, bias: F.gelu(a @ b + bias)),
    "gemm_bias_relu": product(("a", "b"), ("bias",), lambda a, b, bias: (a @ b + bias).relu()),
    "kv_append_": draw_append,
    "layer_norm": rows_of(
        ("x",), ("weight", "bias"), lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias)
    ),
    "matmul": product(("a", "b"), (), lambda a, b: a @ b),
    "mla_decode": draw_mla,
    "moe_ffn": draw_experts,
    "moe_route": draw_route,
    "quant_gemm": draw_quant,
    "rms_norm": draw_rms,
    "rope": draw_rope,
    "rope_": lambda at: (draw_rope(at)[0], rope_),
    "rope_append": draw_rope_append,
    "sample": draw_sample,
    "seq_sum": draw_sums,
    "silu_mul": rows_of(("gate", "up"), (), lambda gate, up: F.silu(gate) * up),
    "softmax": draw_softmax,
    "swiglu": product(("x", "wg", "wu"), (), lambda x, wg, wu: F.silu(x @ wg) * (x @ wu), True),
}
