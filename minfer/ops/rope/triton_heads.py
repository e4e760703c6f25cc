"""triton_heads: one program for some heads of a token, those of q first and those of k after them.

Idea: pairs of halves are two blocks, (heads, pairs), each of which is one load. Interleaved pairs are one block, split in
registers, so that its load is contiguous. One launch serves both tensors: a program has heads of q, or of k.
Expected: as v02_vectors for many tokens; for few, more latency before the first load. Measured: see docs/rope.md.
"""
# Measured (H200, float32, counted, out, batch=32, seq=2048, heads=8, kv_heads=0, head_dim=256, rotary_dim=256): 4021 GB/s cold;
#   739.2 % of torch.

import torch
import triton
import triton.language as tl


@triton.jit
def rotate(
    to, source, head0, heads, of_head_to, of_head, cos_row, sin_row, in_row, half, dim,
    BACKWARD: tl.constexpr, INTERLEAVED: tl.constexpr, COPIES: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    head = head0 + tl.arange(0, HEADS)[:, None]
    rows, to_rows = source + head * of_head, to + head * of_head_to
    pair = tl.arange(0, PAIRS)[None, :]
    cos = tl.load(cos_row + pair, mask=pair < in_row, other=float("nan"))
    sin = tl.load(sin_row + pair, mask=pair < in_row, other=float("nan"))
    if BACKWARD:
        sin = -sin
    kind = to.dtype.element_ty
    if INTERLEAVED:
        at = tl.arange(0, 2 * PAIRS)[None, :]
        inside = (head < heads) & (at < 2 * half)
        both = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (HEADS, PAIRS, 2)))
        turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (HEADS, 2 * PAIRS))
        tl.store(to_rows + at, turned.to(kind), mask=inside)
    else:
        inside = (head < heads) & (pair < half)
        a = tl.load(rows + pair, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(rows + half + pair, mask=inside, other=0.0).to(tl.float32)
        tl.store(to_rows + pair, (a * cos - b * sin).to(kind), mask=inside)
        tl.store(to_rows + half + pair, (b * cos + a * sin).to(kind), mask=inside)
    if COPIES:
        rest = 2 * half + tl.arange(0, REST)[None, :]
        inside = (head < heads) & (rest < dim)
        tl.store(to_rows + rest, tl.load(rows + rest, mask=inside), mask=inside)


@triton.jit
def kernel(
    q_out, k_out, q, k, positions, cos, sin, seq, q_heads, k_heads, half, dim, table_rows,
    q_out_b, q_out_s, q_out_h, k_out_b, k_out_s, k_out_h, q_b, q_s, q_h, k_b, k_s, k_h, cos_r, sin_r,
    GIVEN: tl.constexpr, BACKWARD: tl.constexpr, INTERLEAVED: tl.constexpr, COPIES: tl.constexpr, HEADS: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    b, s = token // seq, token % seq
    row = tl.load(positions + token).to(tl.int64) if GIVEN else s
    in_row = tl.where((row >= 0) & (row < table_rows), half, 0)  # angles that the tables have for it
    cos_row, sin_row = cos + row * cos_r, sin + row * sin_r
    group = tl.program_id(1)
    groups = tl.cdiv(q_heads, HEADS)
    if group < groups:
        rotate(
            q_out + b * q_out_b + s * q_out_s, q + b * q_b + s * q_s, group * HEADS, q_heads, q_out_h, q_h,
            cos_row, sin_row, in_row, half, dim, BACKWARD, INTERLEAVED, COPIES, HEADS, PAIRS, REST,
        )  # fmt: skip
    else:
        rotate(
            k_out + b * k_out_b + s * k_out_s, k + b * k_b + s * k_s, (group - groups) * HEADS, k_heads, k_out_h, k_h,
            cos_row, sin_row, in_row, half, dim, BACKWARD, INTERLEAVED, COPIES, HEADS, PAIRS, REST,
        )  # fmt: skip


def rope(
    q_out: torch.Tensor, k_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor, backward: bool = False, interleaved: bool = False,
) -> None:  # fmt: skip
    batch, seq, q_heads, dim = q_out.shape
    k_heads, half, in_place = k_out.shape[2], cos.shape[1], q.shape[1] == 0
    if in_place:
        q, k = q_out, k_out
    pairs = triton.next_power_of_2(half)
    # 4096 elements a program: 32 of each thread of 128.
    heads = min(triton.next_power_of_2(max(q_heads, k_heads)), max(1, 2048 // pairs))
    groups = triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)
    rest = triton.next_power_of_2(max(1, dim - 2 * half))
    strides = [stride for x in (q_out, k_out, q, k) for stride in x.stride()[:3]]
    kernel[(batch * seq, groups)](
        q_out, k_out, q, k, positions, cos, sin, seq, q_heads, k_heads, half, dim, cos.shape[0],
        *strides, cos.stride(0), sin.stride(0),
        GIVEN=positions.shape[1] > 0, BACKWARD=backward, INTERLEAVED=interleaved,
        COPIES=not in_place and dim > 2 * half, HEADS=heads, PAIRS=pairs, REST=rest, num_warps=4,
    )  # fmt: skip
