"""triton_sequences: one program a sequence, a block of elements at a time.

Idea: the sum and the stores are a loop each, with no index by hand; lanes keep sums of their own, so that they meet once.
Expected: as v02_block for long sequences; slower for packed ones, whose offsets keep Triton from loads of 16 bytes.
"""
# Measured (H200, float32, padded, full, batch=1024, longest=2048): 2163 GB/s cold; 156.6 % of torch.

import torch
import triton
import triton.language as tl

MOST = 4096  # elements of a block


@triton.jit
def kernel(
    y_ptr, x_ptr, seqlens_ptr, batch, longest, stride_y, stride_x,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    length = longest
    room = longest
    if PACKED:
        first = tl.minimum(tl.maximum(tl.load(seqlens_ptr + number, mask=number > 0, other=0), 0), longest)
        last = number == batch  # not a sequence, but what lies behind them
        end = tl.minimum(tl.maximum(tl.load(seqlens_ptr + number + 1, mask=number < batch, other=0), first), longest)
        length = tl.where(last, 0, end - first)
        room = tl.where(last, longest - first, length)
        y_ptr += first
        x_ptr += first
    else:
        y_ptr += number.to(tl.int64) * stride_y
        x_ptr += number.to(tl.int64) * stride_x
        if LENGTHS:
            length = tl.minimum(tl.maximum(tl.load(seqlens_ptr + number), 0), longest)
    cols = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        sums += tl.load(x_ptr + start + cols, mask=start + cols < length, other=0.0).to(tl.float32)
    total = tl.sum(sums, axis=0)
    for start in range(0, room, BLOCK):
        value = tl.where(start + cols < length, total, 0.0).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + start + cols, value, mask=start + cols < room)


def seq_sum(y: torch.Tensor, x: torch.Tensor, seqlens: torch.Tensor) -> None:
    packed = x.dim() == 1
    longest = x.shape[-1]
    batch = len(seqlens) - 1 if packed else len(x)
    mean = longest // max(1, batch) if packed else longest
    block = min(MOST, max(64, triton.next_power_of_2(mean)))
    kernel[(batch + packed,)](
        y, x, seqlens, batch, longest, y.stride(0), x.stride(0),
        PACKED=packed, LENGTHS=len(seqlens) > 0, BLOCK=block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
