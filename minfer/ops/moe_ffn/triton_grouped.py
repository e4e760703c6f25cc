"""triton_grouped: two grouped products, a program for a tile of one expert, and a launch that adds up each token's slots.

Idea: a program finds its expert from the offsets as they are on the device: a running sum of the experts' tiles, in registers.
The first product gathers rows of x in its loads and has an accumulator each for Wg and Wu; the second scatters its rows to
their slots. Sums of slots are a launch of their own, with the weights, so that two runs give the same bits.
Expected: near the rate of Triton's plain products on this card, 600 TFLOP/s, less the rows that an expert's last tile wastes.
Measured: see docs/moe_ffn.md.
"""
# Measured (H200, bfloat16, uniform, tokens=4096, experts=8, k=2, hidden=4096, ffn=14336): 493.5 TFLOP/s cold; 90.8 % of torch.

import torch
import triton
import triton.language as tl


@triton.jit
def tile_of(offsets_ptr, experts, slots, number, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    # The expert of a tile, its first row and how many rows the expert has from there on; none behind the last tile.
    expert = tl.arange(0, EXPERTS)
    end = tl.minimum(tl.load(offsets_ptr + expert, mask=expert < experts, other=0), slots)
    begin = tl.load(offsets_ptr + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    tiles = tl.where(expert < experts, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    behind = tl.cumsum(tiles, axis=0)
    mine = (behind > number) & (behind - tiles <= number)
    within = tl.sum(tl.where(mine, number - (behind - tiles), 0), axis=0)
    first = tl.sum(tl.where(mine, begin, 0), axis=0) + within * BLOCK_M
    rows = tl.sum(tl.where(mine, end, 0), axis=0) - first
    return (
        tl.sum(tl.where(mine, expert, 0), axis=0).to(tl.int64),
        first,
        tl.where(tl.sum(mine.to(tl.int32), axis=0) > 0, rows, 0),
    )


@triton.jit
def gate_up(
    h_ptr, x_ptr, offsets_ptr, order_ptr, w_ptr, slots, experts, k, hidden, ffn, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert, first, rows = tile_of(offsets_ptr, experts, slots, tl.program_id(1), BLOCK_M, EXPERTS)
    if rows <= 0:
        return
    row = tl.arange(0, BLOCK_M)
    inside = row < rows
    slot = tl.load(order_ptr + first + row, mask=inside, other=0)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (slot // k).to(tl.int64)[:, None] * stride_x + depth[None, :]
    # Columns beyond the edge wrap round to valid addresses; what they compute is masked at the store.
    w_ptrs = w_ptr + (expert * 2 * ffn + cols % ffn)[None, :] * hidden + depth[:, None]
    up = ffn.to(tl.int64) * hidden
    one = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    other = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, hidden, BLOCK_K):
        near = depth < hidden - k0
        x = tl.load(x_ptrs, mask=inside[:, None] & near[None, :], other=0.0)
        one = tl.dot(x, tl.load(w_ptrs, mask=near[:, None], other=0.0), one)
        other = tl.dot(x, tl.load(w_ptrs + up, mask=near[:, None], other=0.0), other)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    h = one * tl.sigmoid(one) * other
    h_ptrs = h_ptr + (first + row).to(tl.int64)[:, None] * ffn + cols[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=inside[:, None] & (cols < ffn)[None, :])


@triton.jit
def down(
    parts_ptr, h_ptr, offsets_ptr, order_ptr, w_ptr, slots, experts, hidden, ffn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    expert, first, rows = tile_of(offsets_ptr, experts, slots, tl.program_id(1), BLOCK_M, EXPERTS)
    if rows <= 0:
        return
    row = tl.arange(0, BLOCK_M)
    inside = row < rows
    slot = tl.load(order_ptr + first + row, mask=inside, other=0)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    h_ptrs = h_ptr + (first + row).to(tl.int64)[:, None] * ffn + depth[None, :]
    w_ptrs = w_ptr + (expert * hidden + cols % hidden)[None, :] * ffn + depth[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, ffn, BLOCK_K):
        near = depth < ffn - k0
        h = tl.load(h_ptrs, mask=inside[:, None] & near[None, :], other=0.0)
        sums = tl.dot(h, tl.load(w_ptrs, mask=near[:, None], other=0.0), sums)
        h_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    parts_ptrs = parts_ptr + slot.to(tl.int64)[:, None] * hidden + cols[None, :]
    tl.store(parts_ptrs, sums.to(parts_ptr.dtype.element_ty), mask=inside[:, None] & (cols < hidden)[None, :])


@triton.jit
def combine(out_ptr, parts_ptr, weights_ptr, indices_ptr, experts, k, hidden, stride_out, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in range(0, k):
        slot = token * k + rank
        index = tl.load(indices_ptr + slot)
        here = (index >= 0) & (index < experts)  # of another slot nobody has written its part
        part = tl.load(parts_ptr + slot * hidden + cols, mask=cols < hidden, other=0.0).to(tl.float32)
        sums += tl.where(here, tl.load(weights_ptr + slot) * part, 0.0)
    tl.store(out_ptr + token * stride_out + cols, sums.to(out_ptr.dtype.element_ty), mask=cols < hidden)


def moe_ffn(
    out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor,
    order: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
) -> None:  # fmt: skip
    (tokens, k), (experts, hidden, ffn) = weights.shape, w_down.shape
    slots = tokens * k
    h, parts = x.new_empty(slots, ffn), x.new_empty(slots, hidden)
    # Three stages of 128 x 64 and twice 128 x 64 take 144 KB of shared memory; twice 64 x 64 take 96 KB, which sm_89 has.
    mean = triton.cdiv(slots, experts)
    block_m = min(128, max(16, triton.next_power_of_2(mean)))
    block_n = 128 if _shared(x.device) >= 160 << 10 else 64
    most = min(slots, slots // block_m + experts)  # row tiles: each expert's last one may have but one row
    shape = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 64, "EXPERTS": triton.next_power_of_2(experts)}
    how = {"num_warps": 8 if block_m == 128 else 4, "num_stages": 3}
    gate_up[(triton.cdiv(ffn, block_n), most)](
        h, x, offsets, order, w_gate_up, slots, experts, k, hidden, ffn, x.stride(0), **shape, **how
    )
    down[(triton.cdiv(hidden, block_n), most)](
        parts, h, offsets, order, w_down, slots, experts, hidden, ffn, **shape, **how
    )
    combine[(tokens, triton.cdiv(hidden, 1024))](
        out, parts, weights, indices, experts, k, hidden, out.stride(0), BLOCK=1024
    )


def _shared(device: torch.device) -> int:
    """Bytes of shared memory that a block may have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 0
