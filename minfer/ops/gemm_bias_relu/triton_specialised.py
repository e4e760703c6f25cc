"""triton_specialised: persistent programs whose tile loop Triton divides among specialised warps, with operands by TMA.

Idea: `tl.range(..., warp_specialize=True)` asks the compiler for what v04_cooperative writes by hand: warps that only copy,
and warps that multiply, so that the epilogue of one tile and the copies of the next run at once.
Expected: nothing where there is one tile a program; near triton_persistent of hgemm for squares, if the compiler has the
transformation for this architecture. Triton 3.6 had a compiler failure for such a loop; a row then says so.
Measured: see docs/gemm_bias_relu.md.
"""
# Measured (H200, float16, TN, m=n=k=8192): 548.0 TFLOP/s cold; 75.3 % of torch.

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def kernel(
    a_desc, b_desc, y_desc, bias_ptr, m, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr, B_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True, warp_specialize=True):
        group = tile // (GROUP_M * tiles_n)
        rows_here = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        row = (group * GROUP_M + tile % (GROUP_M * tiles_n) % rows_here) * BLOCK_M
        col = tile % (GROUP_M * tiles_n) // rows_here * BLOCK_N

        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(k, BLOCK_K)):  # beyond an edge TMA reads zeros, and writes nothing
            a = a_desc.load([row, step * BLOCK_K])
            if B_TRANSPOSED:
                acc = tl.dot(a, b_desc.load([col, step * BLOCK_K]).T, acc)
            else:
                acc = tl.dot(a, b_desc.load([step * BLOCK_K, col]), acc)

        acc += tl.load(bias_ptr + (col + tl.arange(0, BLOCK_N)) % n).to(tl.float32)[None, :]
        y_desc.store([row, col], tl.where(acc < 0, 0.0, acc).to(y_desc.dtype))


def gemm_bias_relu(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> None:
    m, k = a.shape
    n = b.shape[1]
    transposed = b.stride(0) == 1 and b.stride(1) != 1
    block_m, block_n, block_k = 128, 128, 64
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    programs = min(tiles, _multiprocessors(y.device))
    kernel[(programs,)](
        TensorDescriptor(a, [m, k], list(a.stride()), [block_m, block_k]),
        TensorDescriptor(b.t(), [n, k], list(b.t().stride()), [block_n, block_k]) if transposed
        else TensorDescriptor(b, [k, n], list(b.stride()), [block_k, block_n]),
        TensorDescriptor(y, [m, n], list(y.stride()), [block_m, block_n]),
        bias, m, n, k,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=8, PROGRAMS=programs,
        B_TRANSPOSED=transposed, num_warps=4, num_stages=3,
    )  # fmt: skip


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
