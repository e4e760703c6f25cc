"""triton_split: a program takes a part of a sequence's keys for a tile of query rows; a second kernel adds up the parts.

Idea: the scheme of v02_split, with the layout left to Triton's compiler. A tile of latents is loaded once, and is an operand
of both dots, in one of them transposed. A tile has 64 query rows if there are more than 16 and shared memory has room, which
takes 128 registers a thread for the sums; otherwise it has 16.
Expected: slower than v03_wgmma. The compiler copies the tile to shared memory once and reads it twice, but scores and products
take turns, and nothing runs beside the softmax.
"""
# Measured (H200, bfloat16, 64, full, batch=16, new=1, longest=16384, heads=128): 158.1 TFLOP/s cold; 371.4 % of torch.

import torch
import triton
import triton.language as tl

PARTS = 2  # programs for each multiprocessor
LEAST = 128  # keys of a part
LATENT, ROPE = 512, 64


@triton.jit
def split(
    out_ptr, sums_ptr, stats_ptr, q_ptr, lengths, table, cache_ptr, factor, new, heads, most, blocks, splits,
    table_b, out_b, out_t, out_h, q_b, q_t, q_h, c_b, c_t,
    SLOTS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    part, tile, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keys = tl.minimum(tl.maximum(tl.load(lengths + number), 0), most)
    each = tl.cdiv(tl.cdiv(keys, splits), KEYS) * KEYS
    begin = part * each
    end = tl.minimum(begin + each, keys)

    row = tile * ROWS + tl.arange(0, ROWS)
    query = row // heads
    there = query < new
    seen = keys - new + query + 1
    dims = tl.arange(0, LATENT)
    rotated = LATENT + tl.arange(0, ROPE)
    q_rows = q_ptr + number.to(tl.int64) * q_b + query.to(tl.int64) * q_t + (row % heads).to(tl.int64) * q_h
    q = tl.load(q_rows[:, None] + dims[None, :], mask=there[:, None], other=0.0)
    q_rotated = tl.load(q_rows[:, None] + rotated[None, :], mask=there[:, None], other=0.0)

    sums = tl.zeros((ROWS, LATENT), tl.float32)
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
        c_rows = cache_ptr + block * c_b + slot.to(tl.int64) * c_t
        c = tl.load(c_rows[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
        c_rotated = tl.load(c_rows[:, None] + rotated[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q_rotated, tl.trans(c_rotated), tl.dot(q, tl.trans(c))) * factor
        scores = tl.where(inside[None, :] & (key[None, :] < seen[:, None]), scores, float("-inf"))
        highest = tl.maximum(base, tl.max(scores, 1))
        zero = tl.where(highest == float("-inf"), 0.0, highest)
        exponentials = tl.exp2(scores - zero[:, None])
        rescale = tl.exp2(base - zero)
        total = total * rescale + tl.sum(exponentials, 1)
        sums = tl.dot(exponentials.to(c.dtype), c, sums * rescale[:, None])
        base = highest

    if splits == 1:
        sums = sums / tl.where(total > 0, total, 1.0)[:, None]
        to = out_ptr + number.to(tl.int64) * out_b + query.to(tl.int64) * out_t + (row % heads).to(tl.int64) * out_h
        tl.store(to[:, None] + dims[None, :], sums.to(out_ptr.dtype.element_ty), mask=there[:, None])
    else:
        at = (number * splits + part).to(tl.int64) * (new * heads) + row
        tl.store(stats_ptr + 2 * at, base, mask=there)
        tl.store(stats_ptr + 2 * at + 1, total, mask=there)
        tl.store(sums_ptr + at[:, None] * LATENT + dims[None, :], sums, mask=there[:, None])


@triton.jit
def combine(
    out_ptr, sums_ptr, stats_ptr, heads, splits, out_b, out_t, out_h, LATENT: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    head, query, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, row = tl.num_programs(1) * heads, query * heads + head
    part = tl.arange(0, MOST)
    at = (number * splits + part).to(tl.int64) * rows + row
    base = tl.load(stats_ptr + 2 * at, mask=part < splits, other=float("-inf"))
    total = tl.load(stats_ptr + 2 * at + 1, mask=part < splits, other=0.0)
    highest = tl.max(base, 0)
    weights = tl.exp2(base - tl.where(highest == float("-inf"), 0.0, highest))
    whole = tl.sum(weights * total, 0)
    dims = tl.arange(0, LATENT)
    sums = tl.zeros((LATENT,), tl.float32)
    for i in range(splits):
        here = (number * splits + i).to(tl.int64) * rows + row
        weight = tl.sum(tl.where(part == i, weights, 0.0), 0)
        sums += weight * tl.load(sums_ptr + here * LATENT + dims)
    sums = sums / tl.where(whole > 0, whole, 1.0)
    to = out_ptr + number.to(tl.int64) * out_b + query * out_t + head * out_h + dims
    tl.store(to, sums.to(out_ptr.dtype.element_ty))


def mla_decode(
    out: torch.Tensor, q: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor, cache: torch.Tensor,
    scale: float,
) -> None:  # fmt: skip
    batch, new, heads = q.shape[:3]
    blocks, slots = cache.shape[:2]
    paged = page_table.shape[1] > 0
    most = page_table.shape[1] * slots if paged else slots
    if out.numel() == 0:
        return
    device = torch.cuda.get_device_properties(q.device) if q.is_cuda else None
    multiprocessors = device.multi_processor_count if device else 2
    roomy = device is None or device.shared_memory_per_block_optin >= 200 << 10
    rows = 64 if roomy and new * heads > 16 else 16
    tiles = triton.cdiv(new * heads, rows)
    splits = max(1, min(PARTS * multiprocessors // (batch * tiles), triton.cdiv(most, LEAST), 128))
    parts = batch * splits * new * heads if splits > 1 else 1
    sums, stats = (q.new_empty(parts * width, dtype=torch.float32) for width in (LATENT, 2))
    strides = [*out.stride()[:3], *q.stride()[:3], *cache.stride()[:2]]
    split[(splits, tiles, batch)](
        out, sums, stats, q, lengths, page_table, cache, scale * 1.44269504, new, heads, most, blocks, splits,
        page_table.stride(0), *strides, SLOTS=slots if paged else 0, LATENT=LATENT, ROPE=ROPE, ROWS=rows,
        KEYS=32, num_warps=4 if rows == 16 else 8, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        combine[(heads, new, batch)](
            out, sums, stats, heads, splits, *out.stride()[:3],
            LATENT=LATENT, MOST=triton.next_power_of_2(splits), num_warps=1,
        )  # fmt: skip
