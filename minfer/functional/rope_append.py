"""`rope_append`: the kernels of rope_append as one function of PyTorch, `torch.ops.minfer.rope_append`."""

from __future__ import annotations

import torch

from minfer.functional import library

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
        wait for the device: at a position without a row nothing is read, and the rotated elements are NaN.
    where: int64 (tokens,): page * slots + slot, the place of each token. Tokens whose place is outside of the cache, such as -1
        for padding, are not written to it. If two tokens have the same place, either may be kept.
    cos, sin: float32 (longest, rotary_dim / 2), as `rope` has them. Pairs are (x[i], x[i + rotary_dim / 2]).
    q_weight, k_weight: (head_dim,) of the dtype of qkv: each head of q and of k is normalised before, as by `rms_norm` with eps
        (Qwen 3). Both or neither.

    Arithmetic is fp32 and a result is rounded once: with a norm it is not rounded before the rotation, as `rms_norm` and `rope`
    would. `best` picks the kernel, which is compiled at its first call. Works under `torch.compile`. It has no backward: raises
    RuntimeError where one would be recorded. Raises ValueError for arguments that do not fit."""
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
    """Raises ValueError for arguments that do not fit."""

    def refuse(takes: str, got: object) -> ValueError:
        return ValueError(f"minfer.rope_append takes {takes}, got {got}")

    if qkv.dim() != 3 or qkv.dtype not in DTYPES:
        wanted = "qkv of float32, float16 or bfloat16, (tokens, heads + 2 kv_heads, head_dim)"
        raise refuse(wanted, f"{qkv.dtype}, {tuple(qkv.shape)}")
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        shapes = f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        raise refuse("two caches (pages, slots, kv_heads, head_dim) of one shape", shapes)
    if k_cache.dtype != qkv.dtype or v_cache.dtype != qkv.dtype:
        raise refuse(f"caches of the dtype of qkv, {qkv.dtype}", f"{k_cache.dtype} and {v_cache.dtype}")
    (tokens, all_heads, dim), kv_heads = qkv.shape, k_cache.shape[2]
    if k_cache.shape[3] != dim or all_heads < 2 * kv_heads:
        wanted = f"qkv of (tokens, heads + 2 * {kv_heads}, {k_cache.shape[3]}), as the caches have it"
        raise refuse(wanted, tuple(qkv.shape))
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise refuse(
            "contiguous caches, which it changes in place", f"strides {k_cache.stride()} and {v_cache.stride()}"
        )
    for name, tensor, dtype in (("positions", positions, torch.int32), ("where", where, torch.int64)):
        if tensor.dtype != dtype or tensor.shape != (tokens,):
            raise refuse(f"{name} of {dtype} and the shape ({tokens},)", f"{tensor.dtype} and {tuple(tensor.shape)}")
    if cos.dim() != 2 or cos.dtype != torch.float32 or not 2 <= 2 * cos.shape[1] <= dim:
        wanted = f"cos of float32, (longest, rotary_dim / 2) with a rotary_dim of 2 to {dim}"
        raise refuse(wanted, f"{cos.dtype}, {tuple(cos.shape)}")
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise refuse(f"sin as cos, {cos.dtype}, {tuple(cos.shape)}", f"{sin.dtype}, {tuple(sin.shape)}")
    if (q_weight is None) != (k_weight is None):
        raise refuse("q_weight and k_weight, or neither", "one of them")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and (weight.dtype != qkv.dtype or weight.shape != (dim,)):
            raise refuse(f"{name} of {qkv.dtype} and the shape ({dim},)", f"{weight.dtype} and {tuple(weight.shape)}")
    tensors = (qkv, k_cache, v_cache, positions, where, cos, sin, q_weight, k_weight)
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise refuse("tensors on one device", " and ".join(sorted(map(str, devices))))
    return qkv.new_empty((tokens, all_heads - 2 * kv_heads, dim))


_rope_append_op = library.define(
    "rope_append(Tensor qkv, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor positions, Tensor where, Tensor cos, Tensor sin, "
    "Tensor? q_weight, Tensor? k_weight, float eps) -> Tensor",
    _rope_append,
    _fake,
)
