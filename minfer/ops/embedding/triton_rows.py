"""triton_rows: one program for up to 4096 elements of a row.

Idea: the id is a scalar of the program, and the row a block of Triton's: a load and a store.
Expected: as v02_vectors for many tokens; for few, one SM fetches a row alone. Measured: see docs/embedding.md.
"""
# Measured (H200, bfloat16, int64, tokens=16384, vocab=128256, hidden=4096): 3717 GB/s cold; 105.4 % of torch.

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(y_ptr, ids_ptr, table_ptr, hidden, vocab, stride_y, stride_table, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(ids_ptr + row).to(tl.int64)
    readable = tl.where((at >= 0) & (at < vocab), hidden, 0)
    values = tl.load(table_ptr + at * stride_table + cols, mask=cols < readable, other=float("nan"))
    tl.store(y_ptr + row * stride_y + cols, values, mask=cols < hidden)


def embedding(y: torch.Tensor, ids: torch.Tensor, table: torch.Tensor) -> None:
    (tokens,), (vocab, hidden) = ids.shape, table.shape
    if tokens == 0 or hidden == 0:
        return
    block = min(4096, triton.next_power_of_2(hidden))
    grid = (tokens, triton.cdiv(hidden, block))
    # 32 elements a thread: four 16-byte loads of a half type.
    warps = max(1, block // 1024)
    kernel[grid](y, ids, table, hidden, vocab, y.stride(0), table.stride(0), BLOCK=block, num_warps=warps)
