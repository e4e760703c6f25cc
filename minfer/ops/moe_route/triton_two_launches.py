"""triton_two_launches: one program for some tokens, which chooses by repeated argmax; then one program an expert, which sorts.

Idea: Triton has no barrier of a grid, so that the sort is a launch of its own: each expert's program counts the slots of
the experts before it and its own, and then appends its own by a running sum over pieces of the indices. No atomics.
Expected: two launches of 2 to 3 us; at 4096 tokens each of 128 programs reads 128 KB of indices twice, which come from
L2: some microseconds. Measured: see docs/moe_route.md.
"""
# Measured (H200, float32, tokens=4096, experts=128, k=8): 91.13 GB/s cold; 584.2 % of torch.

import torch
import triton
import triton.language as tl


@triton.jit
def choose(weights_ptr, indices_ptr, logits_ptr, tokens, experts, stride, K: tl.constexpr, NORMALIZE: tl.constexpr,
           TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    cols = tl.arange(0, EXPERTS)
    inside = (rows < tokens)[:, None] & (cols < experts)[None, :]
    x = tl.load(logits_ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    # Integers in the order of the floats, so that a NaN is above all numbers and what is outside below.
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x != x, 0x7FFFFFFF, key)
    key = tl.where((cols < experts)[None, :], key, -0x80000000)
    slots = tl.arange(0, SLOTS)
    chosen = tl.zeros((TOKENS, SLOTS), dtype=tl.int32)
    found = tl.zeros((TOKENS, SLOTS), dtype=tl.int32)
    for rank in tl.static_range(K):
        top = tl.max(key, axis=1)
        at = tl.min(tl.where(key == top[:, None], cols[None, :], EXPERTS), axis=1)
        chosen = tl.where((slots == rank)[None, :], at[:, None], chosen)
        found = tl.where((slots == rank)[None, :], top[:, None], found)
        key = tl.where(cols[None, :] == at[:, None], -0x80000000, key)
    values = tl.where(found < 0, found ^ 0x7FFFFFFF, found).to(tl.float32, bitcast=True)
    most = tl.max(tl.where((slots == 0)[None, :], found, -0x80000000), axis=1)
    top_value = tl.where(most < 0, most ^ 0x7FFFFFFF, most).to(tl.float32, bitcast=True)
    weights = tl.where((slots < K)[None, :], tl.exp(values - top_value[:, None]), 0.0)
    if NORMALIZE:
        total = tl.sum(weights, axis=1)
    else:
        total = tl.sum(tl.where((cols < experts)[None, :], tl.exp(x - top_value[:, None]), 0.0), axis=1)
    to = rows[:, None] * K + slots[None, :]
    written = (rows < tokens)[:, None] & (slots < K)[None, :]
    tl.store(weights_ptr + to, weights / total[:, None], mask=written)
    tl.store(indices_ptr + to, chosen, mask=written)


@triton.jit
def sort(counts_ptr, offsets_ptr, order_ptr, indices_ptr, slots, PIECE: tl.constexpr):
    expert = tl.program_id(0)
    piece = tl.arange(0, PIECE)
    own = tl.zeros((PIECE,), dtype=tl.int32)
    before = tl.zeros((PIECE,), dtype=tl.int32)
    for start in range(0, slots, PIECE):
        index = tl.load(indices_ptr + start + piece, mask=start + piece < slots, other=0x7FFFFFFF)
        own += (index == expert).to(tl.int32)
        before += (index < expert).to(tl.int32)
    count = tl.sum(own, axis=0)
    next = tl.sum(before, axis=0)
    tl.store(counts_ptr + expert, count)
    tl.store(offsets_ptr + expert, next + count)
    for start in range(0, slots, PIECE):
        index = tl.load(indices_ptr + start + piece, mask=start + piece < slots, other=0x7FFFFFFF)
        mine = (index == expert).to(tl.int32)
        place = next + tl.cumsum(mine, axis=0) - 1
        tl.store(order_ptr + place, start + piece, mask=mine != 0)
        next += tl.sum(mine, axis=0)


def moe_route(
    weights: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    order: torch.Tensor,
    logits: torch.Tensor,
    normalize: bool = True,
) -> None:
    tokens, experts = logits.shape
    k = weights.shape[1]
    wide = max(2, triton.next_power_of_2(experts))
    rows = max(1, min(512 // wide, 8))
    choose[(triton.cdiv(tokens, rows),)](
        weights, indices, logits, tokens, experts, logits.stride(0), K=k, NORMALIZE=normalize,
        TOKENS=rows, EXPERTS=wide, SLOTS=max(2, triton.next_power_of_2(k)), num_warps=1,
    )  # fmt: skip
    slots = tokens * k
    piece = min(4096, max(32, triton.next_power_of_2(slots)))
    sort[(experts,)](counts, offsets, order, indices, slots, PIECE=piece, num_warps=max(1, min(8, piece // 256)))
