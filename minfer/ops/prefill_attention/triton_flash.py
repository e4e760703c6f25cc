"""triton_flash: one program a tile of queries, online softmax over tiles of keys, both products by tl.dot.

Idea: the scheme of FlashAttention-2 as Triton's compiler lays it out; of the key tiles that a program sees, those that need no
mask are a loop of their own, without comparisons.
Expected: on an H200, where tl.dot becomes wgmma, more than v03_mma for long sequences, and less than kernels in which one
warpgroup's softmax runs under another's products.
"""
# Measured (H200, bfloat16, padded, full, no, batch=1, seq_q=8192, seq_kv=8192, heads=32, kv_heads=32, head_dim=128): 354.6
#   TFLOP/s cold; 58.4 % of torch.

import torch
import triton
import triton.language as tl


@triton.jit
def tanh(x):
    return 1 - 2 / (1 + tl.exp2(x * 2.885390082))


@triton.jit
def step(
    sums, most, total, q, k_ptrs, v_ptrs, key, stride_k, stride_v, begin, end, keys, factor, inside,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    column = key + tl.arange(0, KEYS)
    shift = tl.zeros((1, 1), tl.int64) + key  # times a stride, more than 32 bits
    if MASKED:
        k = tl.load(k_ptrs + shift * stride_k, mask=(column < keys)[None, :], other=0.0)
    else:
        k = tl.load(k_ptrs + shift * stride_k)
    scores = tl.dot(q, k)
    if CAPPED:
        scores = tanh(scores * inside)
    if MASKED:
        seen = (column[None, :] >= begin[:, None]) & (column[None, :] < end[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest) * factor
    exponentials = tl.exp2(scores * factor - base[:, None])
    rescale = tl.exp2(most * factor - base)
    total = total * rescale + tl.sum(exponentials, 1)
    if MASKED:
        v = tl.load(v_ptrs + shift * stride_v, mask=(column < keys)[:, None], other=0.0)
    else:
        v = tl.load(v_ptrs + shift * stride_v)
    sums = tl.dot(exponentials.to(v.dtype), v, sums * rescale[:, None])
    return sums, highest, total


@triton.jit
def kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, q_seqlens, kv_seqlens, batch, seq_q, seq_kv, group, factor, inside, window,
    out_b, out_t, out_h, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, lse_b, lse_h,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr, LENGTHS_Q: tl.constexpr,
    LENGTHS_KV: tl.constexpr, LSE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # Which queries of which sequence: tiles come from the last of a sequence to the first, which has least to do.
    head = tl.program_id(1)
    number, first_q, first_k, queries, keys = tl.program_id(2), 0, 0, seq_q, seq_kv
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    rows_there = seq_q
    if PACKED:
        number, before, tiles = -1, 0, 0
        while (before + tiles <= tl.program_id(0)) & (number + 1 < batch):
            before += tiles
            number += 1
            first_q = tl.minimum(tl.maximum(tl.load(q_seqlens + number), 0), seq_q)
            queries = tl.minimum(tl.maximum(tl.load(q_seqlens + number + 1), first_q), seq_q) - first_q
            tiles = tl.cdiv(queries, ROWS)
        if before + tiles <= tl.program_id(0):
            return
        row0 = (before + tiles - 1 - tl.program_id(0)) * ROWS
        first_k = tl.minimum(tl.maximum(tl.load(kv_seqlens + number), 0), seq_kv)
        keys = tl.minimum(tl.maximum(tl.load(kv_seqlens + number + 1), first_k), seq_kv) - first_k
        rows_there = queries
        number = 0  # of batch strides
    else:
        if LENGTHS_Q:
            queries = tl.minimum(tl.maximum(tl.load(q_seqlens + number), 0), seq_q)
        if LENGTHS_KV:
            keys = tl.minimum(tl.maximum(tl.load(kv_seqlens + number), 0), seq_kv)

    rows = row0 + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    token = (first_q + rows).to(tl.int64)
    position = rows + keys - queries
    begin = tl.zeros((ROWS,), tl.int32)
    end = tl.zeros((ROWS,), tl.int32) + keys
    if CAUSAL:
        end = tl.minimum(end, position + 1)
    elif WINDOW:
        end = tl.minimum(end, position + window)
    if WINDOW:
        begin = tl.maximum(position - window + 1, 0)
    counts = rows < queries
    end = tl.where(counts, end, 0)

    # Keys that any row sees, and of their tiles those that all rows see all of.
    some_begin = tl.min(tl.where(counts, begin, 1 << 30), 0) // KEYS * KEYS
    some_end = tl.max(end, 0)
    all_begin = tl.cdiv(tl.max(begin, 0), KEYS) * KEYS
    all_end = tl.maximum(tl.min(end, 0), 0) // KEYS * KEYS
    all_begin = tl.minimum(tl.maximum(all_begin, some_begin), tl.maximum(some_end, some_begin))
    all_end = tl.maximum(all_end, all_begin)

    batch_index = number.to(tl.int64) if not PACKED else 0
    q_ptrs = q_ptr + batch_index * q_b + head * q_h + token[:, None] * q_t + dims[None, :]
    q = tl.load(q_ptrs, mask=counts[:, None], other=0.0)
    places = first_k + tl.arange(0, KEYS).to(tl.int64)
    kv_head = head // group
    k_ptrs = k_ptr + batch_index * k_b + kv_head * k_h + places[None, :] * k_t + dims[:, None]
    v_ptrs = v_ptr + batch_index * v_b + kv_head * v_h + places[:, None] * v_t + dims[None, :]

    sums = tl.zeros((ROWS, DIM), tl.float32)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for key in range(some_begin, tl.minimum(all_begin, some_end), KEYS):
        sums, most, total = step(
            sums, most, total, q, k_ptrs, v_ptrs, key, k_t, v_t, begin, end, keys, factor, inside, True, CAPPED, KEYS
        )
    for key in range(all_begin, all_end, KEYS):
        sums, most, total = step(
            sums, most, total, q, k_ptrs, v_ptrs, key, k_t, v_t, begin, end, keys, factor, inside, False, CAPPED, KEYS
        )
    for key in range(all_end, some_end, KEYS):
        sums, most, total = step(
            sums, most, total, q, k_ptrs, v_ptrs, key, k_t, v_t, begin, end, keys, factor, inside, True, CAPPED, KEYS
        )

    there = rows < rows_there
    seen = most != float("-inf")
    sums = tl.where((seen & counts)[:, None], sums / tl.where(seen, total, 1.0)[:, None], 0.0)
    out_ptrs = out_ptr + batch_index * out_b + head * out_h + token[:, None] * out_t + dims[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=there[:, None])
    if LSE:
        lse = (most * factor + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471806
        lse = tl.where(seen & counts, lse, float("-inf"))
        tl.store(lse_ptr + batch_index * lse_b + head * lse_h + token, lse, mask=there)


def prefill_attention(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_seqlens: torch.Tensor,
    kv_seqlens: torch.Tensor, causal: bool = True, window: int = 0, softcap: float = 0.0, scale: float = 0.0,
) -> None:  # fmt: skip
    packed = q.dim() == 3
    seq_q, heads, dim = q.shape[-3:]
    seq_kv, kv_heads = k.shape[-3:-1]
    if out.numel() == 0:
        return
    scale = scale or dim**-0.5
    rows, keys = (64, 32) if dim == 256 else (128, 64)
    strides = [s for x in (out, q, k, v) for s in ((0, *x.stride()[:2]) if packed else x.stride()[:3])]
    batch = len(q_seqlens) - 1 if packed else len(q)
    grid = (seq_q // rows + batch, heads, 1) if packed else (triton.cdiv(seq_q, rows), heads, batch)
    kernel[grid](
        out, lse, q, k, v, q_seqlens, kv_seqlens, batch, seq_q, seq_kv, heads // kv_heads,
        (softcap or scale) * 1.44269504, scale / softcap if softcap else 1.0, min(window, 1 << 29),
        *strides, heads * seq_q, seq_q,
        CAUSAL=causal, WINDOW=window > 0, CAPPED=softcap > 0, PACKED=packed, LENGTHS_Q=len(q_seqlens) > 0,
        LENGTHS_KV=len(kv_seqlens) > 0, LSE=lse.numel() > 0, DIM=dim, ROWS=rows, KEYS=keys,
        num_warps=8 if dim == 128 else 4, num_stages=2,
    )  # fmt: skip
