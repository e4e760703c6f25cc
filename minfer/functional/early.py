"""Functions of a decoder's step on an H100 or H200, with kernels whose launches begin while the previous ones still run
(programmatic dependent launch). A step has hundreds of short launches, and without this memory would idle between them.

Each does what the function of the same name does, and calls it wherever its own kernel does not fit. `matmul` and `swiglu` read
their weights before the previous launches have ended. So no launch that may still run may write these weights. In a step
nothing writes a model's weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from minfer.functional import library
from minfer.functional.decode_attention import decode_attention as any_decode_attention
from minfer.functional.gated_unit import swiglu as any_swiglu
from minfer.functional.hgemm import matmul as any_matmul
from minfer.functional.norms import rms_norm as any_rms_norm
from minfer.functional.norms import rows_of
from minfer.functional.rope_append import rope_append as any_rope_append
from minfer.ops import get

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)
MOST = 128  # rows


def takes(x: Tensor, *others: Tensor) -> bool:
    """Whether there are kernels for x, (rows, size), on the current device, and whether they can read x and the others in
    place."""
    return (
        x.is_cuda
        and x.device.index == torch.cuda.current_device()
        and x.dim() == 2
        and x.dtype in HALVES
        and 0 < x.shape[0] <= MOST
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and all(library.readable(each) is each for each in (x, *others))
    )


@cache
def _kernel(op: str, device: torch.device) -> Callable[..., None]:
    (kernel,) = (each for each in get(op).kernels.values() if each.early)
    return library.registered(kernel, device, *kernel.entries[:1])


def _fits(*sizes: int) -> bool:
    return all(size > 0 and size % 8 == 0 for size in sizes)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`minfer.matmul` of rows and the transpose of a weight (N, K), which nothing writes meanwhile."""
    if not (takes(a, b.t()) and _fits(*b.shape)):
        return any_matmul(a, b)
    out = a.new_empty(a.shape[0], b.shape[1])
    _kernel("hgemm", a.device)(out, a, b, 1.0, 0.0)
    return out


def swiglu(x: Tensor, wg: Tensor, wu: Tensor) -> Tensor:
    """`minfer.swiglu` of rows and the transposes of two weights (N, K), which nothing writes meanwhile."""
    if not (takes(x, wg.t(), wu.t()) and _fits(*wg.shape)):
        return any_swiglu(x, wg, wu)
    out, none = x.new_empty(x.shape[0], wg.shape[1]), x.new_empty(0)
    _kernel("gated_unit", x.device)(out, x, wg, none, wu, none)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None) -> Tensor:
    """`minfer.rms_norm`; the kernel is another one where there is a residual."""
    if residual is None or not (takes(x, residual) and _fits(x.shape[1]) and x.shape[1] <= 1 << 14):
        return any_rms_norm(x, weight, eps, residual)
    y = torch.empty_like(x)
    _kernel("add_rmsnorm", x.device)(y, rows_of(residual), x, library.readable(weight), eps)
    return y


def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, page_table: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`minfer.decode_attention` of one new token of each sequence over pages of 16 bits."""
    plain = window is None and softcap is None and sinks is None
    if not (plain and q.shape[1] == 1 and q.is_contiguous() and takes(q.flatten(1), k_cache, v_cache)):
        return any_decode_attention(
            q,
            k_cache,
            v_cache,
            lengths,
            page_table=page_table,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
    out, none = torch.empty_like(q), q.new_empty(0, dtype=torch.float32)
    table = page_table.contiguous()
    _kernel("decode_attention", q.device)(out, q, lengths.contiguous(), table, k_cache, v_cache, none, scale)
    return out


def rope_append(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, where: Tensor, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """`minfer.rope_append` of the heads of a step, contiguous."""
    weights = [each for each in (q_weight, k_weight) if each is not None]
    fits = cos.shape[1] % 8 == 0 and qkv.shape[2] % 8 == 0
    if not (qkv.is_contiguous() and fits and takes(qkv.flatten(1), k_cache, v_cache, cos, sin, *weights)):
        return any_rope_append(qkv, k_cache, v_cache, positions, where, cos, sin, q_weight, k_weight, eps)
    q = qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * k_cache.shape[2], qkv.shape[2])
    of_norm = weights or [qkv.new_empty(0)] * 2
    rows = positions.contiguous(), where.contiguous(), cos, sin
    _kernel("rope_append", qkv.device)(q, k_cache, v_cache, qkv, *rows, *of_norm, eps)
    return q
