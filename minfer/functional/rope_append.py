"""`rope_append`: the kernels of rope_append as one function of PyTorch, `torch.ops.minfer.rope_append`."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.functional.contract import Contract

Tensor = torch.Tensor
TAKES = Contract(
    "rope_append",
    """
    qkv: float32 | float16 | bfloat16 (tokens, all_heads, head_dim)
    k_cache: qkv (pages, slots, kv_heads, head_dim)
    v_cache: qkv (pages, slots, kv_heads, head_dim)
    positions: int32 (tokens)
    where: int64 (tokens)
    cos: float32 (longest, half)
    sin: float32 (longest, half)
    q_weight: qkv (head_dim)
    k_weight: qkv (head_dim)
    """,
)


@library.public
def rope_append(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    where: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Rotate q and k, write k and v to their places in two caches, in place, and return q: a new (tokens, heads, head_dim).

    qkv: (tokens, heads + 2 kv_heads, head_dim), float32, float16 or bfloat16: the heads of q, of k and of v, as one projection
        gives them. It is not changed. Rows that start at multiples of 16 bytes are read in place, others are copied first.
    k_cache, v_cache: (pages, slots, kv_heads, head_dim), contiguous, of the dtype of qkv.
    positions: int32 (tokens,), the row of each token in cos and sin. The host does not check them, because it would have to
        wait for the device. If a position has no row, nothing is read there, and the rotated elements are NaN.
    where: int64 (tokens,): page * slots + slot, the place of each token. Tokens whose place is outside of the cache, such as -1
        for padding, are not written to it. If two tokens have the same place, it is undefined whose k and v are kept.
    cos, sin: float32 (longest, rotary_dim / 2), as `rope` has them. Pairs are (x[i], x[i + rotary_dim / 2]).
    q_weight, k_weight: (head_dim,) of the dtype of qkv: each head of q and of k is normalised before the rotation, as by
        `rms_norm` with eps (Qwen 3). Give both or neither.

    Arithmetic is fp32 and a result is rounded once. `rms_norm` and then `rope` would also round between the norm and the
    rotation. `best` picks the kernel, which is compiled at its first call. Works under `torch.compile`. It has no backward:
    raises RuntimeError where one would be recorded. Raises ValueError for arguments that do not fit."""
    library.refuse_gradients("rope_append", qkv, k_cache, v_cache, cos, sin, q_weight, k_weight)
    found: Tensor = _rope_append_op(qkv, k_cache, v_cache, positions, where, cos, sin, q_weight, k_weight, eps)
    return found


def _rope_append(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    where: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    q = _fake(qkv, k_cache, v_cache, positions, where, cos, sin, q_weight, k_weight, eps)
    if qkv.numel() == 0:
        return q
    tokens, heads, dim = q.shape
    nothing = qkv.new_empty(0)
    weights = [nothing if weight is None else library.readable(weight) for weight in (q_weight, k_weight)]
    shape = {
        "tokens": tokens,
        "heads": heads,
        "kv_heads": k_cache.shape[2],
        "head_dim": dim,
        "rotary_dim": 2 * cos.shape[1],
    }
    params = {"norm": "none" if q_weight is None else "heads", "padding": "none"}
    rows = [library.readable(each) for each in (cos, sin)]
    tensors = (q, k_cache, v_cache, library.readable(qkv), positions.contiguous(), where.contiguous(), *rows, *weights)
    library.call("rope_append", tensors, qkv.dtype, shape, params, eps=eps)
    return q


def _fake(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    where: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """An empty q. Raises ValueError for arguments that do not fit."""
    if (q_weight is None) != (k_weight is None):
        raise TAKES.error("q_weight and k_weight together, or neither", "None for one of them")
    if qkv.dim() != 3:
        raise TAKES.error("qkv of (tokens, heads + 2 * kv_heads, head_dim)", tuple(qkv.shape))
    sizes = TAKES.check(qkv, k_cache, v_cache, positions, where, cos, sin, q_weight, k_weight)
    tokens, dim, kv_heads, half = (sizes[axis] for axis in ("tokens", "head_dim", "kv_heads", "half"))
    heads = sizes["all_heads"] - 2 * kv_heads
    if heads < 0:
        takes = f"qkv of ({tokens}, heads + 2 * {kv_heads}, {dim}), with the {kv_heads} kv_heads of k_cache"
        raise TAKES.error(takes, tuple(qkv.shape))
    if not 1 <= half <= dim // 2:
        raise TAKES.error(f"cos of 1 to head_dim / 2 = {dim // 2} columns", half)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not cache.is_contiguous():
            raise TAKES.error(f"a contiguous {name}, which it changes in place", f"strides {cache.stride()}")
    return qkv.new_empty((tokens, heads, dim))


_rope_append_op = library.define(
    "rope_append(Tensor qkv, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor positions, Tensor where, Tensor cos, Tensor sin, "
    "Tensor? q_weight, Tensor? k_weight, float eps) -> Tensor",
    _rope_append,
    _fake,
)
