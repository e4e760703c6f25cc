"""Functions of a decoder's step on an H100 or H200, with kernels whose launches begin while the previous ones still run
(programmatic dependent launch). A step has hundreds of short launches, and without this memory would idle between them.

Each does what the function of the same name does, and calls it wherever its own kernel does not fit. Products read their
weights before the previous launches have ended. So no launch that may still run may write these weights. In a step nothing
writes a model's weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from minfer.functional import library
from minfer.functional.decode_attention import PAGES
from minfer.functional.decode_attention import decode_attention as any_decode_attention
from minfer.functional.gated_unit import swiglu as any_swiglu
from minfer.functional.hgemm import matmul as any_matmul
from minfer.functional.norms import rms_norm as any_rms_norm
from minfer.functional.norms import rows_of
from minfer.functional.quantised import quant_gemm as any_quant_gemm
from minfer.functional.rope_append import rope_append as any_rope_append
from minfer.functional.silu_mul import silu_mul
from minfer.ops import Case, Kernel, get

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)
MOST = 128  # rows
INT4 = {"format": "int4_g128", "accumulate": "float32"}


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


def _early_kernel(op: str) -> Kernel:
    (kernel,) = (each for each in get(op).kernels.values() if each.early)
    return kernel


@cache
def _kernel(op: str, device: torch.device, entry: str = "") -> Callable[..., None]:
    kernel = _early_kernel(op)
    return library.registered(kernel, device, *([entry] if entry else kernel.entries[:1]))


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


def quant_gemm(x: Tensor, w: Tensor, format: str, scales: Tensor | None, eights: Tensor | None = None) -> Tensor:
    """`minfer.quant_gemm` of rows and of weights that nothing writes meanwhile, whose zeros in int4 are 8. eights: these zeros,
    of the shape of scales, for kernels that read zeros."""
    if scales is None or not _takes_packed(x, w, format, scales):
        return any_quant_gemm(x, w, format, scales, eights)
    return _multiply_packed("constant", x, w, scales, len(w))


def quant_swiglu(x: Tensor, w: Tensor, format: str, scales: Tensor | None, eights: Tensor | None = None) -> Tensor:
    """SwiGLU (rows, n / 2) of such weights: the first n / 2 rows of w are those of the gate. Only one result is rounded where a
    kernel computes all of it."""
    if scales is None or len(w) % 2 or not _takes_packed(x, w, format, scales):
        return silu_mul(*quant_gemm(x, w, format, scales, eights).chunk(2, -1))
    return _multiply_packed("swiglu", x, w, scales, len(w) // 2)


def _takes_packed(x: Tensor, w: Tensor, format: str, scales: Tensor) -> bool:
    """Whether there is a kernel for rows x and packed weights."""
    return (
        format == INT4["format"]
        and takes(x)
        and x.is_contiguous()
        and all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (w, scales))
        and _fits_packed(x.shape[0], len(w), x.shape[1])
    )


@cache
def _fits_packed(m: int, n: int, k: int) -> bool:
    kernel = _early_kernel("quant_gemm")
    case = Case("quant_gemm", kernel.name, "bfloat16", INT4, {"m": m, "n": n, "k": k})
    return min(n, k) > 0 and (kernel.requires is None or kernel.requires(case) is None)


def _multiply_packed(entry: str, x: Tensor, w: Tensor, scales: Tensor, columns: int) -> Tensor:
    y = x.new_empty(x.shape[0], columns)
    _kernel("quant_gemm", x.device, entry)(y, x, w.view(len(w), -1, 64), scales, x.new_empty(0))
    return y


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
    usual = plain and k_cache.shape[1] in PAGES
    if not (usual and q.shape[1] == 1 and q.is_contiguous() and takes(q.flatten(1), k_cache, v_cache)):
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
    out, none = q.new_empty((*q.shape[:3], v_cache.shape[3])), q.new_empty(0, dtype=torch.float32)
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
