"""rope_append: rotary position embedding of q and k, and the keys and values of the tokens to their places in a paged cache,
in one launch. With `params.norm` heads, each head of q and of k is normalised before (as in Qwen 3).

qkv is what one projection gives, (tokens, heads + 2 kv_heads, head_dim): the heads of q, of k and of v; its rows may lie apart.
q is (tokens, heads, head_dim), new. The caches are (pages, 16, kv_heads, head_dim) and changed in place; where[t] = page * 16 +
slot is the place of token t. A place outside of the cache is not written: `params.padding` is none, or some for every eighth
token, whose place is -1, and whose k and v are NaN.

The rotation is that of `rope`: pairs are (x[i], x[i + rotary_dim / 2]), positions[t] is the row of token t in the fp32 tables
cos and sin, and the elements of a head behind rotary_dim stay as they are. The norm is that of `rmsnorm`, over a head, with a
weight for all heads of q and one for all of k; the weights are empty without it. Arithmetic is fp32. A result is rounded once,
or also between the norm and the rotation, as when these are two kernels.
"""

from __future__ import annotations

import torch

from minfer.ops import (
    DTYPES,
    GBPS,
    Case,
    Draw,
    Expected,
    Op,
    Spec,
    Tensors,
    exact,
    floats,
    given,
    inout,
    made_by,
    out,
    size,
    within,
)  # fmt: skip
from minfer.ops.drawn import Problem, Source
from minfer.ops.rope import U, even, rotary, table, turned

PAGE = 16
Tensor = torch.Tensor


def has_norm(case: Case) -> bool:
    return case.params["norm"] == "heads"


def is_padding(case: Case, token: int) -> bool:
    return case.params["padding"] == "some" and token % 8 == 7


def pages_of(case: Case) -> int:
    """Half as many again as the tokens fill."""
    return -(-3 * case["tokens"] // (2 * PAGE))


def tensors(case: Case) -> list[Spec]:
    tokens, heads, kv_heads, dim = case["tokens"], case["heads"], case["kv_heads"], case["head_dim"]
    half, rows, of_norm = case["rotary_dim"] // 2, 2 * tokens, dim if has_norm(case) else 0

    def padded(made: Tensors) -> Tensor:
        """Of qkv: the keys and values of padding."""
        device = made["k_cache"].device
        token = torch.tensor([is_padding(case, token) for token in range(tokens)], device=device)
        return token[:, None, None] & (torch.arange(heads + 2 * kv_heads, device=device) >= heads)[None, :, None]

    def positions(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
        return torch.tensor(draw.random.sample(range(rows), tokens), dtype=torch.int32, device=device)

    def places(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
        found = draw.random.sample(range(pages_of(case) * PAGE), tokens)
        return torch.tensor([-1 if is_padding(case, i) else place for i, place in enumerate(found)], device=device)

    def angles(function: str) -> Spec:
        def make(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
            """NaN in the rows that no token has."""
            values: Tensor = getattr(table(rows, half, device), function)()
            unread = torch.ones(rows, dtype=torch.bool, device=device)
            unread[made["positions"].long()] = False
            return values.masked_fill_(unread[:, None], float("nan"))

        return given(function, rows, half, dtype="float32", fill=made_by(make))

    return [
        out("q", tokens, heads, dim),
        inout("k_cache", pages_of(case), PAGE, kv_heads, dim),
        inout("v_cache", pages_of(case), PAGE, kv_heads, dim),
        given(
            "qkv",
            tokens,
            heads + 2 * kv_heads,
            dim,
            fill=floats(poison=padded) if case.params["padding"] == "some" else None,
        ),
        given("positions", tokens, dtype="int32", fill=made_by(positions)),
        given("where", tokens, dtype="int64", fill=made_by(places)),
        angles("cos"),
        angles("sin"),
        given("q_weight", of_norm, fill=floats(0.1, shift=1.0)),
        given("k_weight", of_norm, fill=floats(0.1, shift=1.0)),
    ]


def split(qkv: Tensor, k_cache: Tensor) -> tuple[Tensor, ...]:
    """The heads of q, k and v."""
    kv_heads = k_cache.shape[2]
    return qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)


def reference(case: Case, t: Tensors, eps: float) -> dict[str, Expected]:
    """The bounds of rope. With the norm those of rmsnorm, of both elements of a pair, and half an ulp of them, because what is
    rotated may be rounded to its dtype before."""
    cos, sin = (t[name][t["positions"].long()][:, None].tile(2) for name in ("cos", "sin"))
    rotary_dim = cos.shape[-1]
    q, k, v = split(t["qkv"], t["k_cache"])
    roundings, of_dtype = 6.0, 0.0
    if has_norm(case):
        q, k = (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * t[weight]
            for x, weight in ((q, "q_weight"), (k, "k_weight"))
        )
        roundings += 2 * case["head_dim"] ** 0.5 + 8
        of_dtype = torch.finfo(DTYPES[case.dtype]).eps / 2
    found = []
    for x in (q, k):
        rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        other = turned(rotated, False)
        bound = torch.cat((rotated.abs() + other.abs(), rest.abs() if has_norm(case) else torch.zeros_like(rest)), -1)
        found.append((torch.cat((rotated * cos + other * sin, rest), -1), bound * (roundings * U + of_dtype)))
    place = t["where"]
    kept = place >= 0

    def stored(cache: Tensor, rows: Tensor) -> Tensor:
        cache = cache.clone()
        cache.flatten(0, 1)[place[kept]] = rows[kept]
        return cache

    (q_value, q_bound), (k_value, k_bound) = found
    return {
        "q": within(q_value, q_bound),
        "k_cache": within(stored(t["k_cache"], k_value), stored(torch.zeros_like(t["k_cache"]), k_bound)),
        "v_cache": exact(stored(t["v_cache"], v)),
    }


def traffic(case: Case) -> tuple[float, float]:
    """Each row of qkv is read, but for the keys and values of padding, and written; and the angles, positions and places."""
    tokens, item = case["tokens"], DTYPES[case.dtype].itemsize
    live = tokens - sum(is_padding(case, token) for token in range(tokens))
    moved = 1.0 * (tokens * case["heads"] + live * 2 * case["kv_heads"]) * case["head_dim"] * item
    weights = 2.0 * case["head_dim"] * item if has_norm(case) else 0.0
    return moved + tokens * (4.0 * case["rotary_dim"] + 12) + weights, moved


def eager(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, qkv: Tensor, positions: Tensor, where: Tensor, cos: Tensor, sin: Tensor,
    q_weight: Tensor, k_weight: Tensor, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """As models in PyTorch write it: the norms, x * cos + rotate_half(x) * sin, and an `index_put_` a cache."""
    heads, k, v = split(qkv, k_cache)
    if q_weight.numel():
        heads = torch.nn.functional.rms_norm(heads, q_weight.shape, q_weight, eps)
        k = torch.nn.functional.rms_norm(k, k_weight.shape, k_weight, eps)
    cos, sin = (values[positions][:, None].tile(2) for values in (cos, sin))

    def rotate(x: Tensor) -> Tensor:
        rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        found = (rotated * cos + turned(rotated, False) * sin).to(x.dtype)
        return torch.cat((found, rest), -1) if rest.shape[-1] else found

    for cache, rows in ((k_cache, rotate(k)), (v_cache, v)):
        cache.flatten(0, 1).index_put_((where,), rows)
    return rotate(heads)


def vectors(case: Case) -> str | None:
    """The rule that both halves of what is rotated, and what is not, are of 16-byte pieces."""
    for axis, factor in (("rotary_dim", 16), ("head_dim", 8)):
        if case[axis] % factor:
            return f"needs {axis} to be a multiple of {factor}, got {case[axis]}"
    return None


def layer(source: Source) -> Problem:
    """The heads of a model, for the tokens of a step."""
    model = source.model
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim, "rotary_dim": model.head_dim}
    return Problem(source.half(), {"tokens": source.tokens()} | sizes, {"norm": source.rng.choice(["none", "heads"])})


def shape(tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int) -> dict[str, int]:
    return {
        "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": rotary_dim
    }  # fmt: skip


op = Op(
    "rope_append",
    axes={"tokens": size(20), "heads": size(8), "kv_heads": size(4), "head_dim": even(96), "rotary_dim": rotary()},
    params={"norm": ("none", "heads"), "padding": ("none", "some")},
    tensors=tensors,
    reference=reference,
    calls={"append": {"eps": 1e-6}, "large_eps": {"eps": 0.5}},
    traffic=traffic,
    metric=GBPS,
    strided=("qkv", "cos", "sin"),
    odd_shapes=(shape(11, 3, 2, 40, 32), shape(9, 1, 1, 22, 14)),
    sizes={
        "small": [shape(1, 1, 1, 2, 2), shape(19, 5, 1, 48, 48)],
        "large": [shape(64, 32, 8, 128, 128), shape(2049, 32, 8, 128, 128), shape(300, 28, 4, 256, 64)],
    },
)

ALL = ("float32", "float16", "bfloat16")

op.torch("torch", eager, baseline=True, returns=(0,), dtypes=ALL, params={"padding": ("none",)})
op.cuda("v01_naive.cu", dtypes=ALL)
op.cuda("v02_vectors.cu", dtypes=ALL, requires=vectors)
op.cuda("v03_early.cu", archs="sm_90a", dtypes=ALL, requires=vectors, early=True)
op.cpp("cpu_heads.cpp", dtypes=ALL)
op.function(
    "rope_append",
    lambda minfer, q, k_cache, v_cache, qkv, positions, where, cos, sin, q_weight, k_weight, eps: minfer.rope_append(
        qkv, k_cache, v_cache, positions, where, cos, sin, *(x if len(x) else None for x in (q_weight, k_weight)), eps
    ),
    returns=(0,),
    dtypes=ALL,
    params={"padding": ("none",)},
)
op.draws(layer)
