"""hgemm: C = alpha * A @ B + beta * C in half precision.

A is (M, K), B is (K, N), C is (M, N); C and A are row-major. The layout is the case's: in `NN` B is row-major too; in
`TN` B is stored as (N, K), as `nn.Linear` keeps its weight, so that both operands are contiguous in K. Kernels get B
as a (K, N) view either way and read its strides. As in BLAS, C is not read when beta is 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minfer.ops import Case, Op, at_most, both, multiples


def inputs(case: Case, rand: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
    m, n, k = case.shape["m"], case.shape["n"], case.shape["k"]
    return rand(m, k), rand(n, k).t() if case.params["layout"] == "TN" else rand(k, n)


def reference(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product and the sum of magnitudes |alpha| |A| |B| + |beta C| (Higham, Accuracy and Stability, section 3.5)."""
    expected, magnitude = alpha * (a @ b), abs(alpha) * (a.abs() @ b.abs())
    if beta != 0:
        expected, magnitude = expected + beta * out, magnitude + (beta * out).abs()
    return expected, magnitude


def torch_matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, beta: float = 0.0) -> None:
    """cuBLAS (oneDNN on a CPU) through PyTorch."""
    if alpha == 1.0 and beta == 0.0:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, alpha=alpha, beta=beta, out=out)


def torch_matmul_acc16(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0, beta: float = 0.0
) -> None:
    """The same with cuBLAS allowed to add up in fp16, for this call alone (a CPU's library takes no notice)."""
    backend = torch.backends.cuda.matmul
    before = backend.allow_fp16_accumulation
    backend.allow_fp16_accumulation = True
    try:
        torch_matmul(out, a, b, alpha, beta)
    finally:
        backend.allow_fp16_accumulation = before


op = Op(
    "hgemm",
    axes=("m", "n", "k"),
    params={"layout": ("TN", "NN"), "accumulate": ("float32", "float16")},
    inputs=inputs,
    out_shape=lambda case: (case.shape["m"], case.shape["n"]),
    reference=reference,
    reduction=lambda case: case.shape["k"],
    flops=lambda m, n, k: 2 * m * n * k,
    bytes=lambda m, n, k, size: size * (m * k + k * n + m * n),
    odd_shapes=({"m": 33, "n": 65, "k": 17}, {"m": 1, "n": 136, "k": 264}),
    calls=({"alpha": 1.0, "beta": 0.0}, {"alpha": -0.5, "beta": 2.0}),
    reads_out=lambda alpha, beta: beta != 0,
)

FLOAT32, FLOAT16 = {"accumulate": ("float32",)}, {"accumulate": ("float16",)}
VECTORS = multiples(n=8, k=8)  # rows of 16-byte pieces
SKINNY = {m: both(VECTORS, at_most(m=m)) for m in (8, 128)}

op.torch("torch", torch_matmul, baseline=True, params=FLOAT32)
op.torch("torch_acc16", torch_matmul_acc16, baseline=True, params=FLOAT16, dtypes=("float16",))
op.cuda("v01_naive.cu", params=FLOAT32)
op.cuda("v02_tiled.cu", params=FLOAT32)
for rung in ("v02a_column", "v02b_padded", "v02c_swizzled"):
    op.cuda(f"{rung}.cu", params=FLOAT32)
op.cuda("v03_wmma.cu", params=FLOAT32)
for rung in ("v04_mma", "v05_pipelined", "v06_swizzled", "v07_tuned"):
    op.cuda(f"{rung}.cu", params=FLOAT32, requires=VECTORS)
    op.cuda(f"{rung}.cu", name=f"{rung}_acc16", params=FLOAT16, dtypes=("float16",), requires=VECTORS)
op.cuda("v08_split_k.cu", params=FLOAT32, requires=VECTORS)
op.cuda("v08_stream_k.cu", params=FLOAT32, requires=VECTORS)
op.cuda("v09_a_stationary.cu", params=FLOAT32, requires=VECTORS, deterministic=False)
for rung in ("v10_wgmma", "v11_specialised", "v12_pingpong", "v13_cooperative", "v14_small", "v14_stream_k"):
    op.cuda(f"{rung}.cu", archs="sm_90a", params=FLOAT32, requires=VECTORS)
op.cuda("v15_gemv.cu", params=FLOAT32, requires=SKINNY[8])
op.cuda("v16_skinny.cu", params=FLOAT32, requires=SKINNY[128])
op.cuda("v17_one_wave.cu", archs="sm_90a", params=FLOAT32, requires=SKINNY[128])
op.triton("triton_tiled.py", params=FLOAT32)
op.triton("triton_persistent.py", archs="sm_90+", params=FLOAT32, requires=VECTORS)
op.cpp("cpu_naive.cpp", params=FLOAT32)
op.cpp("cpu_blocked.cpp", params=FLOAT32)
