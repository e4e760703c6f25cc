"""triton_tiled: one program an output tile, a software-pipelined loop over K, tiles ordered in groups for the L2.

Idea: `tl.dot` gets the tensor cores and Triton's pipeliner the asynchronous copies, with no hand-written index.
Expected: above 80 % of cuBLAS for large squares.
"""
# Measured (H200, bfloat16, TN, float32, m=n=k=8192): 612.1 TFLOP/s cold, 512.5 steady; 78.2 % and 76.7 % of torch.

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(
    c_ptr, a_ptr, b_ptr, m, n, k, alpha, beta,
    stride_cm, stride_am, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    READ_C: tl.constexpr,
):  # fmt: skip
    # Groups of GROUP_M rows of tiles are taken column by column, so that a wave of programs shares rows and columns.
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    group = program // (GROUP_M * tiles_n)
    rows_here = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + program % (GROUP_M * tiles_n) % rows_here
    tile_n = program % (GROUP_M * tiles_n) // rows_here

    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the edge wrap round to valid addresses; what they compute is masked at the store.
    a_ptrs = a_ptr + (rows % m)[:, None] * stride_am + depth[None, :]
    b_ptrs = b_ptr + depth[:, None] * stride_bk + (cols % n)[None, :] * stride_bn

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, k, BLOCK_K):
        a = tl.load(a_ptrs, mask=depth[None, :] < k - k0, other=0.0)
        b = tl.load(b_ptrs, mask=depth[:, None] < k - k0, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk

    c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :]
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    result = alpha * acc
    if READ_C:
        result += beta * tl.load(c_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(c_ptrs, result.to(c_ptr.dtype.element_ty), mask=inside)


def hgemm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, beta: float = 0.0) -> None:
    m, k = a.shape
    n = b.shape[1]
    # Three stages of 128x128x64 take 96 KB of shared memory, which an sm_89 block (99 KB) still has.
    block_m = min(128, max(16, triton.next_power_of_2(m)))
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, 128),)
    kernel[grid](
        out, a, b, m, n, k, float(alpha), float(beta),
        out.stride(0), a.stride(0), b.stride(0), b.stride(1),
        BLOCK_M=block_m, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, READ_C=beta != 0,
        num_warps=8 if block_m == 128 else 4, num_stages=3,
    )  # fmt: skip
