"""`kv_append_`: the kernels of kv_append as one function of PyTorch, `torch.ops.minfer.kv_append_`."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.functional.contract import Contract
from minfer.ops.kv_append import PAGE


def _contract(paged: bool, quantised: bool) -> Contract:
    stored, blocks = "float8_e4m3fn" if quantised else "k", "blocks" if paged else "batch"
    return Contract(
        "kv_append_",
        f"""
        k: float32 | float16 | bfloat16 ({"tokens" if paged else "batch, new"}, kv_heads, head_dim)
        v: k ({"tokens" if paged else "batch, new"}, kv_heads, head_dim)
        k_cache: {stored} ({blocks}, slots, kv_heads, head_dim)
        v_cache: {stored} ({blocks}, slots, kv_heads, head_dim)
        where: int64 ({"tokens" if paged else "batch"})
        scales: float32 (2)
        """,
    )


CONTRACTS = {(paged, quantised): _contract(paged, quantised) for paged in (False, True) for quantised in (False, True)}


@library.public
def kv_append_(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens to two caches, (blocks, slots, kv_heads, head_dim), contiguous, in place.

    Paged, where k and v are (tokens, kv_heads, head_dim): token t is written to where[t] = page * slots + slot, a slot
    mapping as vLLM has it. Contiguous, where k and v are (batch, new, kv_heads, head_dim) and a block is a sequence: where[i]
    is the position of the first new token of sequence i. `where` is int64. Tokens whose place is outside of the cache, such
    as -1 for padding, are not written. If two tokens have the same place, either may be kept. The caches must not share
    elements; the function only checks that they are not the same tensor object.

    The caches have the dtype of k and v, float32, float16 or bfloat16. With `scales`, float32 (2,), one for k and one for v,
    the caches are float8_e4m3fn and keep value / scale, saturated to 448. k and v may be parts of one projection, with other
    columns between their tokens; what a kernel cannot read is copied first. `best` picks the kernel, which is compiled at its
    first call. Works under `torch.compile`. It has no backward: raises RuntimeError where one would be recorded. Raises
    ValueError for arguments that do not fit."""
    if k_cache is v_cache:
        raise ValueError("minfer.kv_append_ takes two caches that share no elements, got one tensor as both")
    library.refuse_gradients("kv_append_", k_cache, v_cache, k, v, scales)
    _kv_append_op(k_cache, v_cache, k, v, where, scales)


def _append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    _check(k_cache, v_cache, k, v, where, scales)
    if k.numel() == 0 or k_cache.numel() == 0:
        return
    paged, (slots, heads, dim) = k.dim() == 3, k_cache.shape[1:]
    rows = [library.readable(tensor.reshape(-1, heads * dim)) for tensor in (k, v)]
    batch, new = (k.shape[0], 1) if paged else k.shape[:2]
    if not paged:
        rows = [tensor.unflatten(0, (batch, new)) for tensor in rows]
    shape = {"batch": batch, "longest": PAGE if paged else slots, "new": new, "kv_heads": heads, "head_dim": dim}
    params = {"cache": "paged" if paged else "contiguous", "quant": "none" if scales is None else "fp8"}
    more = () if scales is None else (scales.contiguous(),)
    tensors = (k_cache, v_cache, *rows, where.contiguous(), *more)
    library.call("kv_append", tensors, k.dtype, shape, params | {"padding": "none"})


def _check(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Raises ValueError for arguments that do not fit; also serves as the fake kernel."""
    contract = CONTRACTS[k.dim() == 3, scales is not None]
    if k.dim() not in (3, 4):
        raise contract.error("k of (tokens, kv_heads, head_dim) or (batch, new, kv_heads, head_dim)", tuple(k.shape))
    contract.check(k, v, k_cache, v_cache, where, scales)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not cache.is_contiguous():
            raise contract.error(f"a contiguous {name}, which it changes in place", f"strides {cache.stride()}")


_kv_append_op = library.define(
    "kv_append_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor where, Tensor? scales=None) -> ()",
    _append,
    _check,
)
