"""triton_rows: one program a row, which keeps rows of up to 16384 in registers and goes over longer ones twice.

Idea: a row, or a block of it, is one block of Triton's. For long rows each lane of the block has a maximum and a sum of its
own, so that the lanes meet once, after the first pass.
Expected: as v03_one_read up to 16384; for longer rows 2/3 of the copy's speed, because they are read twice. Measured: see
docs/softmax.md.
"""
# Measured (H100 80GB HBM3, bfloat16, none, rows=4096, n=128256): 1959 GB/s cold, 1946 steady; 133.0 % and 132.6 % of torch.

import torch
import triton
import triton.language as tl

MOST = 16384  # elements that a program keeps


@triton.jit
def logits_at(x_ptr, mask_ptr, cols, valid, MASK: tl.constexpr):
    inside = cols < valid
    logits = tl.load(x_ptr + cols, mask=inside, other=float("-inf")).to(tl.float32)
    if MASK == 1:
        logits += tl.load(mask_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    return logits


@triton.jit
def kernel(y_ptr, x_ptr, mask_ptr, n, stride_y, stride_x, MASK: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    y_ptr += row * stride_y
    valid = n
    if MASK == 2:
        valid = tl.minimum(tl.load(mask_ptr + row), n)
    cols = tl.arange(0, BLOCK)
    dtype = y_ptr.dtype.element_ty
    if WHOLE:
        logits = logits_at(x_ptr, mask_ptr, cols, valid, MASK)
        most = tl.max(logits, axis=0)
        exponentials = tl.exp(logits - tl.where(most == float("-inf"), 0.0, most))
        tl.store(y_ptr + cols, (exponentials / tl.sum(exponentials, axis=0)).to(dtype), mask=cols < n)
    else:
        maxima = tl.full((BLOCK,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, n, BLOCK):
            logits = logits_at(x_ptr, mask_ptr, start + cols, valid, MASK)
            higher = tl.maximum(maxima, logits)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            sums = sums * tl.exp(maxima - base) + tl.exp(logits - base)
            maxima = higher
        most = tl.max(maxima, axis=0)
        base = tl.where(most == float("-inf"), 0.0, most)
        total = tl.sum(sums * tl.exp(maxima - base), axis=0)
        for start in range(0, n, BLOCK):
            logits = logits_at(x_ptr, mask_ptr, start + cols, valid, MASK)
            tl.store(y_ptr + start + cols, (tl.exp(logits - base) / total).to(dtype), mask=start + cols < n)


def softmax(y: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> None:
    rows, n = x.shape
    kind = 2 if mask.dtype == torch.int32 else int(mask.numel() > 0)
    whole = n <= MOST
    block = triton.next_power_of_2(n) if whole else MOST // 4
    # 16 elements a thread: two 16-byte loads of a half type.
    num_warps = min(32, max(1, block // 512))
    kernel[(rows,)](y, x, mask, n, y.stride(0), x.stride(0), MASK=kind, BLOCK=block, WHOLE=whole, num_warps=num_warps)
