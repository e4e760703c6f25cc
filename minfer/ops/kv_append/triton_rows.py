"""triton_rows: one program for a token's row of k, and one for its row of v.

Idea: the place is a scalar of the program, and the row a block of Triton's: a load and a store.
Expected: as v02_vectors for many tokens; with few, twice as many programs share the loads. Measured: see docs/kv_append.md.
"""
# Measured (H200, bfloat16, paged, none, none, batch=8, longest=2048, new=2048, kv_heads=8, head_dim=128): 3601 GB/s cold; 424.1
#   % of torch.

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(
    k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, where_ptr, width, fresh, longest, places, stride_k, stride_v,
    PAGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    if PAGED:
        place = tl.load(where_ptr + token)
        valid = (place >= 0) & (place < places)
    else:
        sequence = token // fresh
        first = tl.load(where_ptr + sequence)
        position = first + token % fresh
        place = sequence * longest + position
        valid = (first >= 0) & (position < longest)
    if valid:
        if which == 0:
            row = tl.load(k_ptr + token * stride_k + cols, mask=inside)
        else:
            row = tl.load(v_ptr + token * stride_v + cols, mask=inside)
        if which == 0:
            tl.store(k_cache_ptr + place * width + cols, row, mask=inside)
        else:
            tl.store(v_cache_ptr + place * width + cols, row, mask=inside)


def kv_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: torch.Tensor,
) -> None:
    if k.numel() == 0:
        return
    paged, width = k.dim() == 2, k.shape[-1]
    fresh = 1 if paged else k.shape[1]
    tokens = k.shape[0] * fresh
    longest, places = k_cache.shape[1], k_cache.shape[0] * k_cache.shape[1]
    strides = [rows.stride(0) if paged or fresh == 1 else rows.stride(1) for rows in (k, v)]
    block = triton.next_power_of_2(width)
    kernel[(tokens, 2)](
        k_cache, v_cache, k, v, where, width, fresh, longest, places, *strides,
        PAGED=paged, BLOCK=block, num_warps=min(8, max(1, block // 256)),
    )  # fmt: skip
