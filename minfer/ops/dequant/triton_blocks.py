"""triton_blocks: one program for a few blocks of the matrix; each format is a dozen lines of index arithmetic.

Idea: a program names the bytes that each of its weights needs. The size of a block is no power of two, so Triton's loads are of
single bytes, neither wide nor aligned; the bytes that neighbours share come from L1.
Expected: between v01_naive and v02_vectors: as many loads as v01, but stores of 16 bytes and more of them in flight.
"""
# Measured (H200, bfloat16, q8_0, n=28672, k=4096): 3874 GB/s cold; 1195 % of torch.

import torch
import triton
import triton.language as tl

SIZE = 1024  # weights of a program
# The formats by the bytes of a block, as `w` has them: weights, and a number for the branch in `kernel`.
FORMATS = {34: (32, 0), 18: (32, 1), 144: (256, 2), 210: (256, 3), 32: (64, 4), 64: (128, 4)}


@triton.jit
def half_at(w_ptr, inside):
    low = tl.load(w_ptr, mask=inside, other=0).to(tl.uint16)
    high = tl.load(w_ptr + 1, mask=inside, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def weights_at(
    w_ptr, scales_ptr, zeros_ptr, at, k, inside, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr
):
    """The weights number `at` of the matrix, which lies row after row, in fp32."""
    block, i = at // BLOCK, (at % BLOCK).to(tl.int32)
    p = w_ptr + block * BYTES
    if FORMAT == 0:  # q8_0
        q = tl.load(p + 2 + i, mask=inside, other=0).to(tl.int8, bitcast=True)
        found = half_at(p, inside) * q.to(tl.float32)
    elif FORMAT == 1:  # q4_0
        q = tl.load(p + 2 + i % 16, mask=inside, other=0).to(tl.int32) >> (i // 16 * 4) & 15
        found = half_at(p, inside) * (q - 8).to(tl.float32)
    elif FORMAT == 2:  # q4_k
        sub = i // 32
        of_scale = tl.load(p + 4 + sub % 4, mask=inside, other=0).to(tl.int32)
        of_least = tl.load(p + 8 + sub % 4, mask=inside, other=0).to(tl.int32)
        mixed = tl.load(p + 12 + sub % 4, mask=inside, other=0).to(tl.int32)
        scale = tl.where(sub < 4, of_scale & 63, (mixed & 15) | (of_scale >> 2 & 48))
        least = tl.where(sub < 4, of_least & 63, (mixed >> 4) | (of_least >> 2 & 48))
        q = tl.load(p + 16 + sub // 2 * 32 + i % 32, mask=inside, other=0).to(tl.int32) >> (sub % 2 * 4) & 15
        found = half_at(p, inside) * scale.to(tl.float32) * q.to(tl.float32)
        found -= half_at(p + 2, inside) * least.to(tl.float32)
    elif FORMAT == 3:  # q6_k
        half, quarter, place = i // 128, i % 128 // 32, i % 32
        low = tl.load(p + half * 64 + quarter % 2 * 32 + place, mask=inside, other=0).to(tl.int32)
        high = tl.load(p + 128 + half * 32 + place, mask=inside, other=0).to(tl.int32)
        q = (low >> (quarter // 2 * 4) & 15) | ((high >> (quarter * 2) & 3) << 4)
        scale = tl.load(p + 192 + i // 16, mask=inside, other=0).to(tl.int8, bitcast=True)
        found = half_at(p + 208, inside) * scale.to(tl.float32) * (q - 32).to(tl.float32)
    elif FORMAT == 4:  # int4
        q = tl.load(p + i // 2, mask=inside, other=0).to(tl.int32) >> (i % 2 * 4) & 15
        zero = tl.load(zeros_ptr + block, mask=inside, other=0.0).to(tl.float32)
        found = (q.to(tl.float32) - zero) * tl.load(scales_ptr + block, mask=inside, other=0.0).to(tl.float32)
    else:  # fp8, whose exponent of 4 bits stands in the place of one of 8: sm_80 has no instruction for it
        byte = tl.load(w_ptr + at, mask=inside, other=0).to(tl.uint32)
        sign, rest = (byte & 0x80) << 24, byte & 0x7F
        found = (sign | (rest << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        found = tl.where(rest == 0x7F, float("nan"), found)
        found = found * tl.load(scales_ptr + at // k, mask=inside, other=0.0)
    return found


@triton.jit
def kernel(
    y_ptr, w_ptr, scales_ptr, zeros_ptr, count, k,
    FORMAT: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    found = weights_at(w_ptr, scales_ptr, zeros_ptr, at, k, inside, FORMAT, BLOCK, BYTES)
    tl.store(y_ptr + at, found.to(y_ptr.dtype.element_ty), mask=inside)


def described(w: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """w as bytes, and what `weights_at` wants to know of its format."""
    if w.dtype == torch.float8_e4m3fn:
        return w.view(torch.uint8), 5, 1, 1
    block, number = FORMATS[w.shape[2]]
    return w, number, block, w.shape[2]


def dequant(y: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> None:
    if not y.numel():
        return
    w, number, block, nbytes = described(w)
    grid = (triton.cdiv(y.numel(), SIZE),)
    kernel[grid](
        y, w, scales, zeros, y.numel(), y.shape[1], FORMAT=number, BLOCK=block, BYTES=nbytes, SIZE=SIZE, num_warps=4
    )
