"""hgemm: C = alpha * A @ B + beta * C in half precision.

A is (M, K), B is (K, N), C is (M, N); C and A are row-major. The layout is the case's: in `NN` B is row-major too; in
`TN` B is stored as (N, K), as `nn.Linear` keeps its weight, so that both operands are contiguous in K. Kernels get B
as a (K, N) view either way and read its strides. As in BLAS, C is not read when beta is 0.
"""

from __future__ import annotations

import torch

from minfer.ops import TFLOPS, Case, Expected, Op, Spec, Tensors, at_most, both, dot, given, inout, multiples, out, size


def tensors(case: Case) -> list[Spec]:
    m, n, k = case["m"], case["n"], case["k"]
    c = inout if op.call(case)["beta"] else out
    b = given("b", k, n, order=(1, 0) if case.params["layout"] == "TN" else None)
    return [c("out", m, n), given("a", m, k), b]


def reference(case: Case, t: Tensors, alpha: float, beta: float) -> dict[str, Expected]:
    """The product, with the sum of magnitudes |alpha| |A| |B| + |beta C|."""
    expected, magnitude = alpha * (t["a"] @ t["b"]), abs(alpha) * (t["a"].abs() @ t["b"].abs())
    if beta != 0:
        expected, magnitude = expected + beta * t["out"], magnitude + (beta * t["out"]).abs()
    return {"out": dot(expected, magnitude, case["k"], case.params["accumulate"])}


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
    axes={"m": size(), "n": size(), "k": size()},
    params={"layout": ("TN", "NN"), "accumulate": ("float32", "float16")},
    tensors=tensors,
    reference=reference,
    calls={"product": {"alpha": 1.0, "beta": 0.0}, "scaled_sum": {"alpha": -0.5, "beta": 2.0}},
    flops=lambda case: 2.0 * case["m"] * case["n"] * case["k"],
    arithmetic=lambda case: (case.dtype, case.params["accumulate"]),
    metric=TFLOPS,
    strided=("out", "a", "b"),
    odd_shapes=({"m": 33, "n": 65, "k": 17}, {"m": 1, "n": 136, "k": 264}),
    sizes={
        "small": [
            {"m": 1, "n": 1, "k": 1},
            {"m": 7, "n": 600, "k": 300},
            {"m": 100, "n": 64, "k": 520},
            {"m": 64, "n": 64, "k": 64},
            {"m": 1, "n": 264, "k": 72},
            {"m": 20, "n": 264, "k": 72},
            {"m": 136, "n": 264, "k": 72},
            {"m": 8, "n": 264, "k": 1040},
            {"m": 257, "n": 384, "k": 200},
        ],
        "nan": [{"m": 64, "n": 128, "k": 64}, {"m": 8, "n": 128, "k": 1024}],
        "large": [
            {"m": 1, "n": 4096, "k": 4096},
            {"m": 8, "n": 264, "k": 416},
            {"m": 257, "n": 384, "k": 1000},
            {"m": 1024, "n": 1024, "k": 1024},
            {"m": 2550, "n": 2552, "k": 1032},  # 100 tiles of 256x256: one wave and a half of an H100's clusters
        ],
    },
)

FLOAT32, FLOAT16 = {"accumulate": ("float32",)}, {"accumulate": ("float16",)}
VECTORS = multiples(n=8, k=8)  # rows of 16-byte pieces
SKINNY = {m: both(VECTORS, at_most(m=m)) for m in (8, 128, 1024)}

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
for rung in ("v10_wgmma", "v11_specialised"):
    op.cuda(f"{rung}.cu", archs="sm_90a", params=FLOAT32, requires=VECTORS)
op.cuda("v12_pingpong.cu", archs="sm_90a", params=FLOAT32, requires=VECTORS, preferred="pingpong")
op.cuda("v13_cooperative.cu", archs="sm_90a", params=FLOAT32, requires=VECTORS)
op.cuda("v14_small.cu", archs="sm_90a", params=FLOAT32, requires=VECTORS, preferred="small")
op.cuda("v14_stream_k.cu", archs="sm_90a", params=FLOAT32, requires=VECTORS, preferred="stream_k")
op.cuda("v15_gemv.cu", params=FLOAT32, requires=SKINNY[8], preferred="gemv", before_hopper="mma_gemv")
op.cuda("v16_skinny.cu", params=FLOAT32, requires=SKINNY[128], preferred="skinny", before_hopper="mma_skinny")
op.cuda("v17_one_wave.cu", archs="sm_90a", params=FLOAT32, requires=SKINNY[128], preferred="one_wave")
op.cuda("v18_fitted.cu", archs="sm_90a", params=FLOAT32 | {"call": ("product",)}, preferred="fitted")
op.cuda("v19_early.cu", archs="sm_90a", params=FLOAT32, requires=SKINNY[128], entries=("constant",), early=True)
op.cuda(
    "v20_any_columns.cu",
    params=FLOAT32 | {"layout": ("NN",)},
    requires=at_most(m=64),
    preferred="any_columns",
)
op.cuda("v21_row_pairs.cu", archs="sm_90a", params=FLOAT32, requires=SKINNY[1024], preferred="row_pairs")
op.cuda("v22_any_size.cu", params=FLOAT32, preferred="any_size")
op.cuda("v23_mma_fitted.cu", params=FLOAT32, requires=VECTORS, before_hopper="mma_fitted")
op.triton("triton_tiled.py", params=FLOAT32)
op.triton("triton_persistent.py", archs="sm_90+", params=FLOAT32, requires=VECTORS)
op.cpp("cpu_naive.cpp", params=FLOAT32)
op.cpp("cpu_skinny.cpp", params={**FLOAT32, "layout": ("TN",)}, requires=at_most(m=16))
op.cpp("cpu_blocked.cpp", params=FLOAT32)
op.function(
    "matmul",
    lambda minfer, out, a, b, **call: minfer.matmul(a, b),
    returns=(0,),
    params=FLOAT32 | {"call": ("product",)},
)
op.draws("product")
