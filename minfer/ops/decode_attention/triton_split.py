"""triton_split: a program has a part of a sequence's keys for all heads of a group, and a second kernel adds up the parts.

Idea: the scheme of v03_packed as Triton's compiler lays it out: 16 or more rows of tl.dot, a gather of pages by their table.
Expected: between v02_split and v03_packed: the compiler's pipeline has fewer bytes under way, and addresses of pages are loaded
a tile at a time.
"""
# Measured (H200, bfloat16, none, full, none, batch=16, new=1, longest=8192, heads=32, kv_heads=8, head_dim=128): 3851 GB/s
#   cold; 89.8 % of torch.

import torch
import triton
import triton.language as tl

PARTS = 8  # programs for each multiprocessor
LEAST = 128  # keys of a part


@triton.jit
def split(
    out_ptr, sums_ptr, stats_ptr, q_ptr, lengths, table, k_ptr, v_ptr, scales, factor, new, group, most, blocks, splits,
    table_b, out_b, out_t, out_h, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    SLOTS: tl.constexpr, FP8: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    part, kv_head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keys = tl.minimum(tl.maximum(tl.load(lengths + number), 0), most)
    each = tl.cdiv(tl.cdiv(keys, splits), KEYS) * KEYS
    begin = part * each
    end = tl.minimum(begin + each, keys)

    row = tl.arange(0, ROWS)
    query = row // group
    there = query < new
    seen = keys - new + query + 1
    dims = tl.arange(0, DIM)
    head = kv_head * group + row % group
    q_rows = number.to(tl.int64) * q_b + query * q_t + head * q_h
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=there[:, None], other=0.0)
    if FP8:
        factor = factor * tl.load(scales)

    sums = tl.zeros((ROWS, DIM), tl.float32)
    base = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for key0 in range(begin, end, KEYS):
        key = key0 + tl.arange(0, KEYS)
        inside = key < end
        if SLOTS:
            page = tl.load(table + number.to(tl.int64) * table_b + key // SLOTS, mask=inside, other=0)
            block = tl.where((page >= 0) & (page < blocks), page, 0).to(tl.int64)
            slot = key % SLOTS
        else:
            block = tl.zeros((KEYS,), tl.int64) + number
            slot = key
        k_rows = block * k_b + slot.to(tl.int64) * k_t + kv_head * k_h
        v_rows = block * v_b + slot.to(tl.int64) * v_t + kv_head * v_h
        k = tl.load(k_ptr + k_rows[None, :] + dims[:, None], mask=inside[None, :], other=0.0)
        v = tl.load(v_ptr + v_rows[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q, k.to(q.dtype)) * factor
        scores = tl.where(inside[None, :] & (key[None, :] < seen[:, None]), scores, float("-inf"))
        highest = tl.maximum(base, tl.max(scores, 1))
        zero = tl.where(highest == float("-inf"), 0.0, highest)
        exponentials = tl.exp2(scores - zero[:, None])
        rescale = tl.exp2(base - zero)
        total = total * rescale + tl.sum(exponentials, 1)
        sums = tl.dot(exponentials.to(q.dtype), v.to(q.dtype), sums * rescale[:, None])
        base = highest

    if splits == 1:
        scale = 1.0
        if FP8:
            scale = tl.load(scales + 1)
        sums = sums * tl.where(total > 0, scale / tl.where(total > 0, total, 1.0), 0.0)[:, None]
        to = out_ptr + number.to(tl.int64) * out_b + (query * out_t + head * out_h)[:, None] + dims[None, :]
        tl.store(to, sums.to(out_ptr.dtype.element_ty), mask=there[:, None])
    else:
        at = ((number * tl.num_programs(1) + kv_head) * splits + part).to(tl.int64) * ROWS + row
        tl.store(stats_ptr + 2 * at, base, mask=there)
        tl.store(stats_ptr + 2 * at + 1, total, mask=there)
        tl.store(sums_ptr + at[:, None] * DIM + dims[None, :], sums, mask=there[:, None])


@triton.jit
def combine(
    out_ptr, sums_ptr, stats_ptr, scales, group, kv_heads, splits, out_b, out_t, out_h,
    FP8: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    head, query, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head, row = head // group, query * group + head % group
    part = tl.arange(0, MOST)
    at = ((number * kv_heads + kv_head) * splits + part).to(tl.int64) * ROWS + row
    base = tl.load(stats_ptr + 2 * at, mask=part < splits, other=float("-inf"))
    total = tl.load(stats_ptr + 2 * at + 1, mask=part < splits, other=0.0)
    highest = tl.max(base, 0)
    weights = tl.exp2(base - tl.where(highest == float("-inf"), 0.0, highest))
    whole = tl.sum(weights * total, 0)
    dims = tl.arange(0, DIM)
    sums = tl.zeros((DIM,), tl.float32)
    for i in range(splits):
        here = ((number * kv_heads + kv_head) * splits + i).to(tl.int64) * ROWS + row
        weight = tl.sum(tl.where(part == i, weights, 0.0), 0)
        sums += weight * tl.load(sums_ptr + here * DIM + dims)
    scale = 1.0
    if FP8:
        scale = tl.load(scales + 1)
    sums = sums * tl.where(whole > 0, scale / tl.where(whole > 0, whole, 1.0), 0.0)
    to = out_ptr + number.to(tl.int64) * out_b + query * out_t + head * out_h + dims
    tl.store(to, sums.to(out_ptr.dtype.element_ty))


def decode_attention(
    out: torch.Tensor, q: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor, scales: torch.Tensor, scale: float = 0.0,
) -> None:  # fmt: skip
    batch, new, heads, dim = q.shape
    blocks, slots, kv_heads = k_cache.shape[:3]
    paged = page_table.shape[1] > 0
    most = page_table.shape[1] * slots if paged else slots
    if out.numel() == 0:
        return
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 2
    items = batch * kv_heads
    splits = max(1, min(PARTS * multiprocessors // items, triton.cdiv(most, LEAST), 128))
    rows = max(16, triton.next_power_of_2(new * heads // kv_heads))
    sums = q.new_empty(items * splits * rows * dim if splits > 1 else 1, dtype=torch.float32)
    stats = q.new_empty(items * splits * rows * 2 if splits > 1 else 1, dtype=torch.float32)
    strides = [stride for x in (out, q, k_cache, v_cache) for stride in x.stride()[:3]]
    group, fp8 = heads // kv_heads, len(scales) > 0
    split[(splits, kv_heads, batch)](
        out, sums, stats, q, lengths, page_table, k_cache, v_cache, scales, (scale or dim**-0.5) * 1.44269504, new, group, most,
        blocks, splits, page_table.stride(0), *strides, SLOTS=slots if paged else 0, FP8=fp8, DIM=dim, ROWS=rows,
        KEYS=32 if dim == 256 else 64, num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        combine[(heads, new, batch)](
            out, sums, stats, scales, group, kv_heads, splits, *out.stride()[:3],
            FP8=fp8, DIM=dim, ROWS=rows, MOST=triton.next_power_of_2(splits), num_warps=1,
        )  # fmt: skip
