"""triton_autotuned: a tile of y a program, whose size, stages and warps Triton's autotuner picks for each problem.

Idea: from 1024x256x512, where one wave of small tiles is what counts, to squares, where large ones are, no one tile is right;
the autotuner times each on the device that it runs on, once for each M, N and K. What that takes is the row's `tune_s`.
Expected: within 10 % of the best CUDA rung where it launches one kernel as they do. Measured: see docs/gemm_bias_relu.md.
"""
# Measured (H200, float16, TN, m=n=k=8192): 523.3 TFLOP/s cold; 71.9 % of torch.

import contextlib
import types

import torch
import triton
import triton.language as tl

# The scopes are compiled in where `profiler.proton.instrument=true` asks for their trace, and are no code elsewhere.
if triton.knobs.runtime.interpret:  # the interpreter has none
    pl = types.SimpleNamespace(scope=contextlib.nullcontext)
else:
    import triton.profiler.language as pl

    pl.enable_semantic("triton")

# Tiles (M, N, K), stages and warps. 96 KB of shared memory at most, which an sm_89 block (99 KB) still has, but for the last.
TILES = [
    (64, 32, 64, 4, 4),
    (64, 32, 128, 4, 4),
    (64, 64, 64, 4, 4),
    (64, 64, 128, 3, 4),
    (128, 64, 64, 4, 4),
    (128, 128, 64, 3, 8),
    (128, 256, 64, 3, 8),
]


def smaller(configs: list[triton.Config], named: dict[str, object], **_: object) -> list[triton.Config]:
    """Those that fit the device's shared memory."""
    a = named["a_ptr"]
    device = a.device if isinstance(a, torch.Tensor) else torch.device("cuda")
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    sizes = [c.num_stages * 2 * c.kwargs["BLOCK_K"] * (c.kwargs["BLOCK_M"] + c.kwargs["BLOCK_N"]) for c in configs]
    return [config for config, size in zip(configs, sizes, strict=True) if size <= most]


@triton.autotune(
    [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_stages=stages, num_warps=warps)
        for m, n, k, stages, warps in TILES
    ],
    key=["m", "n", "k", "stride_bk"],
    prune_configs_by={"early_config_prune": smaller},
)
@triton.jit
def kernel(
    y_ptr, a_ptr, b_ptr, bias_ptr, m, n, k, stride_y, stride_a, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # Groups of GROUP_M rows of tiles are taken column by column, so that a wave of programs shares rows and columns.
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    group = program // (GROUP_M * tiles_n)
    rows_here = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + program % (GROUP_M * tiles_n) % rows_here
    tile_n = program % (GROUP_M * tiles_n) // rows_here

    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the edge wrap round to valid addresses; what they compute is masked at the store.
    a_ptrs = a_ptr + (rows % m)[:, None] * stride_a + depth[None, :]
    b_ptrs = b_ptr + depth[:, None] * stride_bk + (cols % n)[None, :] * stride_bn
    bias = tl.load(bias_ptr + cols % n).to(tl.float32)

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, k, BLOCK_K):
        with pl.scope("load"):
            a = tl.load(a_ptrs, mask=depth[None, :] < k - k0, other=0.0)
            b = tl.load(b_ptrs, mask=depth[:, None] < k - k0, other=0.0)
        with pl.scope("product"):
            acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk

    with pl.scope("epilogue"):
        acc += bias[None, :]
        result = tl.where(acc < 0, 0.0, acc)  # and NaN stays NaN
        y_ptrs = y_ptr + rows[:, None] * stride_y + cols[None, :]
        tl.store(y_ptrs, result.to(y_ptr.dtype.element_ty), mask=(rows[:, None] < m) & (cols[None, :] < n))


def gemm_bias_relu(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> None:
    m, k = a.shape
    n = b.shape[1]
    arguments = (y, a, b, bias, m, n, k, y.stride(0), a.stride(0), b.stride(0), b.stride(1))
    if y.device.type == "cuda":
        kernel[lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)](*arguments, GROUP_M=8)
    else:  # interpreted: there is nothing to time
        grid = (triton.cdiv(m, 64) * triton.cdiv(n, 64),)
        kernel.fn[grid](*arguments, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP_M=8)
