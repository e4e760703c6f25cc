"""triton_fused: a tiled product whose tile of W is decoded to the dtype of x where a product of floats would load it.

Idea: `weights_at` of dequant's Triton kernel makes a tile of W out of bytes, and `tl.dot` takes it. A weight is rounded to the
dtype of x once, and decoded again for each tile of rows of x.
Expected: well below the memory's speed at m = 1, since loads are of single bytes; near a product of floats at many rows.
"""
# Measured (H200, bfloat16, int4_g128, float32, m=16, n=4096, k=4096): 1.459 TFLOP/s cold.

import torch
import triton
import triton.language as tl

from minfer.ops.dequant.triton_blocks import described, weights_at


@triton.jit
def kernel(
    y_ptr, x_ptr, w_ptr, scales_ptr, zeros_ptr, m, n, k,
    FORMAT: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, k, BLOCK_K):
        depth = k0 + tl.arange(0, BLOCK_K)
        inside = (cols < n)[:, None] & (depth < k)[None, :]
        at = cols.to(tl.int64)[:, None] * k + depth[None, :]
        w = weights_at(w_ptr, scales_ptr, zeros_ptr, at, k, inside, FORMAT, BLOCK, BYTES)
        w = tl.where(inside, w, 0.0)
        of_x = (rows < m)[:, None] & (depth < k)[None, :]
        x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * k + depth[None, :], mask=of_x, other=0.0)
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc)
    inside = (rows < m)[:, None] & (cols < n)[None, :]
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * n + cols[None, :], acc.to(y_ptr.dtype.element_ty), mask=inside)


def quant_gemm(
    y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor,
    x_scales: torch.Tensor, packed_w: torch.Tensor, packed_scales: torch.Tensor,
) -> None:  # fmt: skip
    (m, k), n = x.shape, y.shape[1]
    if not y.numel():
        return
    w, number, block, nbytes = described(w)
    block_m = min(64, max(16, triton.next_power_of_2(m)))
    grid = (triton.cdiv(m, block_m), triton.cdiv(n, 64))
    kernel[grid](
        y, x, w, scales, zeros, m, n, k, FORMAT=number, BLOCK=block, BYTES=nbytes,
        BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3,
    )  # fmt: skip
