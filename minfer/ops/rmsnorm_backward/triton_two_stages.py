"""triton_two_stages: programs that go over many rows, each with its part of dweight in registers; a second kernel adds up.

Idea: as v02_two_stages: dy and x are read once, for dx and for dweight. Triton has no barrier of a grid, so the parts are added
up in a launch of its own, in an order that depends on the number of programs only.
Expected: near v02_two_stages for many rows, slower where a row's values, weight and sums are more than the registers of a
program hold as fp32: from 8192 elements on. Measured: see docs/rmsnorm_backward.md.
"""
# Measured (H200, bfloat16, saved, tokens=16384, hidden=4096): 3385 GB/s cold; 184.7 % of torch.

import torch
import triton
import triton.language as tl

PER_SM = 2  # programs of the first kernel: what the registers have room for with rows of 4096
COLUMNS, ROWS = 64, 32  # of the parts that a program of the second kernel adds at a time


@triton.jit
def rows(
    dx_ptr, parts_ptr, dy_ptr, x_ptr, weight_ptr, rstd_ptr, tokens, hidden, eps, stride_dx, stride_dy, stride_x,
    BLOCK: tl.constexpr, SAVED: tl.constexpr,
):  # fmt: skip
    first, step = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < hidden
    dx_ptr, dy_ptr, x_ptr = dx_ptr + first * stride_dx, dy_ptr + first * stride_dy, x_ptr + first * stride_x
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rstd_ptr + token) if SAVED else tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
        normed, g = x * r, dy * weight
        dx = r * (g - normed * (tl.sum(g * normed, axis=0) / hidden))
        tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        sums += dy * normed
        dx_ptr, dy_ptr, x_ptr = dx_ptr + step * stride_dx, dy_ptr + step * stride_dy, x_ptr + step * stride_x
    tl.store(parts_ptr + first * hidden + cols, sums, mask=inside)


@triton.jit
def columns(dweight_ptr, parts_ptr, parts, hidden, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, parts, ROWS):
        of = first + tl.arange(0, ROWS)
        inside = (of < parts)[:, None] & (cols < hidden)[None, :]
        sums += tl.load(parts_ptr + of[:, None].to(tl.int64) * hidden + cols[None, :], mask=inside, other=0.0)
    tl.store(dweight_ptr + cols, tl.sum(sums, axis=0).to(dweight_ptr.dtype.element_ty), mask=cols < hidden)


def rmsnorm_backward(
    dx: torch.Tensor,
    dweight: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    eps: float = 1e-6,
) -> None:
    tokens, hidden = x.shape
    device = torch.cuda.get_device_properties(x.device) if x.is_cuda else None
    programs = min(tokens, PER_SM * device.multi_processor_count if device else 3)
    parts = torch.empty((programs, hidden), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(hidden)
    rows[(programs,)](
        dx, parts, dy, x, weight, rstd, tokens, hidden, float(eps), dx.stride(0), dy.stride(0), x.stride(0),
        BLOCK=block, SAVED=rstd.numel() > 0, num_warps=min(32, max(1, block // 512)),
    )  # fmt: skip
    columns[(triton.cdiv(hidden, COLUMNS),)](dweight, parts, programs, hidden, COLUMNS=COLUMNS, ROWS=ROWS)
