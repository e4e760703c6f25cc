"""quant_gemm: y = x @ Wᵀ with W in 8 or 4 bits, which our kernels never write out as floats.

x is (m, k), W (n, k), y (m, n), in float16 or bfloat16; formats and their layouts are in `minfer/ops/quantised.py`. Sums are
fp32, but for some of `fp8_fp8` (below), and y is rounded once. In `fp8_fp8` x is e4m3 too, with `x_scales` fp32 (m,); y is in
the case's dtype.

`params.accumulate` is float32; `fp8_fp8` also has `promoted` and `fast`, which are less exact, because Hopper's fp8 tensor
cores keep 13 bits of a sum behind the leading one. `promoted`: they sum at most 128 products, and these sums are added up in
fp32; `torch._scaled_mm` promotes, too. `fast`: they sum all products, as `_scaled_mm` does with `use_fast_accum`. Rows of
different `accumulate` are never compared.

`packed_w` and `packed_scales` are W as tinygemm wants it, PyTorch's `_convert_weight_to_int4pack`, which is done before
anything is timed; they are empty where it takes no such case. Our kernels read `w` as it is: none needs another layout.
"""

from __future__ import annotations

import torch

from minfer.ops import TFLOPS, Case, Draw, Expected, Op, Spec, Tensors, given, multiple_of, multiples, out, size, within
from minfer.ops.quant_gemm import baselines
from minfer.ops.quantised import FORMATS, GGUF, INT4, name_of, parts, weight_bytes, weight_specs, whole_blocks
from minfer.ops.tensors import DTYPES, Undo, made_by

U = 2.0**-24
CUT = 2.0**-13  # relative precision of a sum in fp8 tensor cores
PROMOTED = 128  # products that they sum before the sum is added to one in fp32
Tensor = torch.Tensor


def tensors(case: Case) -> list[Spec]:
    m, n, k = case["m"], case["n"], case["k"]
    both = case.params["format"] == "fp8_fp8"
    groups = baselines.tinygemm_groups(case)
    return [
        out("y", m, n),
        given("x", m, k, dtype="float8_e4m3fn" if both else ""),
        *weight_specs(case),
        given("x_scales", m if both else 0, dtype="float32"),
        given("packed_w", n * k // 2 if groups else 0, dtype="uint8", fill=made_by(baselines.packed_weights)),
        given("packed_scales", groups, n if groups else 0, 2, fill=made_by(baselines.packed_scales)),
    ]


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """In fp64. The bound has the terms of fp32 sums (see `dot`), of both parts where a weight is a difference. Besides,
    kernels may round each weight to the dtype of x: relatively by h, in float16 by 2^-25 at least. These errors are independent
    of each other: 6 sqrt(sum (h x w)^2)."""
    name, k = case.params["format"], case["k"]
    x, (first, second) = t["x"], parts(name, t["w"], t["scales"], t["zeros"], torch.float64)
    weight = first - second
    magnitude = first.abs() + second.abs()
    if name in INT4:  # also q * scale - zero * scale
        magnitude = magnitude + 2 * (t["zeros"] * t["scales"]).abs().repeat_interleave(FORMATS[name].block, 1)
    value, bound = x @ weight.T, (x.abs() @ magnitude.T).mul_(4 * k**0.5 * U)
    if name == "fp8_fp8":
        if case.params["accumulate"] == "fast":  # each product is cut off: docs/quant_gemm.md
            squares = x.square() @ weight.square().T
            bound += squares.sqrt_().add_(value.abs()).mul_(2 * k**0.5 * CUT)
        if case.params["accumulate"] == "promoted":
            bound += partial_sums(x, weight).mul_(2 * min(k, PROMOTED) ** 0.5 * CUT)
        scale = t["x_scales"][:, None]
        value, bound = value * scale, bound.mul_(scale.abs()).add_(value.abs() * scale.abs() * 4 * U)
    else:
        h = torch.finfo(DTYPES[case.dtype]).eps / 2
        least = 2.0**-25 if case.dtype == "float16" else 0.0
        squares = x.square() @ weight.square().T
        bound += squares.mul_(h * h).add_(x.square().sum(-1, keepdim=True), alpha=least**2).sqrt_().mul_(6)
    return {"y": within(value, bound)}


def partial_sums(x: Tensor, weight: Tensor) -> Tensor:
    """For each element, sqrt(sum (|s| + sqrt(sum (x w)^2))^2): the outer sum is over groups of PROMOTED products with the sum
    s, the inner one over the products of a group."""
    total = x.new_zeros(len(x), len(weight))
    for left, right in zip(x.split(PROMOTED, 1), weight.split(PROMOTED, 1), strict=True):
        squares = left.square() @ right.square().T
        total += (left @ right.T).abs_().add_(squares.sqrt_()).square_()
    return total.sqrt_()


def change(case: Case, tensors: Tensors, draw: Draw) -> Undo:
    """One element of x: a weight's change would be one of `packed_w` as well."""
    x = tensors["x"]
    element = x[draw.random.randrange(case["m"]), draw.random.randrange(case["k"])]
    before = element.clone()
    element.fill_(draw.float())
    return lambda: element.copy_(before)


def traffic(case: Case) -> tuple[float, float]:
    """x, the weights as they are, and y."""
    y = case["m"] * case["n"] * DTYPES[case.dtype].itemsize
    both = case.params["format"] == "fp8_fp8"
    x = case["m"] * (case["k"] + 4 if both else case["k"] * DTYPES[case.dtype].itemsize)
    return float(x) + weight_bytes(case), float(y)


def shape(m: int, n: int, k: int) -> dict[str, int]:
    return {"m": m, "n": n, "k": k}


op = Op(
    "quant_gemm",
    axes={"m": size(40), "n": size(100), "k": multiple_of(256, 1024)},
    params={"format": tuple(FORMATS), "accumulate": ("float32", "promoted", "fast")},
    tensors=tensors,
    reference=reference,
    flops=lambda case: 2.0 * case["m"] * case["n"] * case["k"],
    traffic=traffic,
    arithmetic=lambda case: (
        "float8_e4m3fn" if case.params["format"] == "fp8_fp8" else case.dtype,
        "float32",
    ),
    metric=TFLOPS,
    change=change,
    odd_shapes=(shape(2, 17, 256), shape(21, 96, 512)),
    sizes={
        "small": [shape(2, 64, 512)],
        "nan": [shape(2, 64, 2048), shape(40, 144, 2048)],
        "large": [
            shape(1, 4096, 4096),
            shape(2, 1000, 6144),
            shape(7, 1000, 2048),
            shape(16, 4104, 4096),
            shape(64, 1040, 6144),
            shape(200, 392, 2048),
            shape(2550, 2552, 1024),
        ],
    },
)


def whole(case: Case) -> str | None:
    """The rules that k is whole blocks, and that only fp8_fp8 has sums that are not fp32."""
    name, sums = case.params["format"], case.params["accumulate"]
    if sums != "float32" and name != "fp8_fp8":
        return f"needs format=fp8_fp8 for accumulate={sums}, got {name}"
    return whole_blocks(case)


PIECE = 256  # weights of a row that the kernels from v02 on copy at once


def pieces(case: Case) -> str | None:
    """The rule that rows are whole pieces that start at multiples of 16 bytes."""
    factor = 8 * PIECE if case.params["format"] == "q6_k" else PIECE
    return f"needs k to be a multiple of {factor}, got {case['k']}" if case["k"] % factor else whole(case)


def fits_gemv(case: Case) -> str | None:
    """The rules that x has at most 2 rows, beyond which v03_mma is faster, and that x fits in a block, or that there are
    counters for the rows of W whose k blocks share."""
    if case["m"] > 2:
        return f"needs m to be at most 2, got {case['m']}"
    wide = case["n"] > 65536 and case["m"] * case["k"] > 8192
    return f"needs n to be at most 65536 with so many x, got {case['n']}" if wide else pieces(case)


def fits_one_wave(case: Case) -> str | None:
    """The rules that a block has all rows of x, and that rows are whole vectors."""
    return f"needs m to be at most 128, got {case['m']}" if case["m"] > 128 else VECTORS(case)


def fits_stream(case: Case) -> str | None:
    """The rules that x has at most 16 rows and fits in a block of Hopper beside a warp's ring of W, and that rows of W are
    whole units of four groups."""
    block = FORMATS[case.params["format"]].block
    unit = 4 * block
    if case["m"] > 16:
        return f"needs m to be at most 16, got {case['m']}"
    if case["k"] % unit:
        return f"needs k to be a multiple of {unit}, got {case['k']}"
    columns, stages = (8, 8) if case["m"] <= 8 else (16, 6)
    x = case["m"] * (2 * case["k"] + 64) + 4 * case["k"] // block * columns  # and the sums of its groups
    if x + 128 + stages * 8 * block > 227 << 10:
        return f"needs x to fit in a block of Hopper, got {case['m']} rows of {case['k']}"
    return None


def fits_int4_wgmma(case: Case) -> str | None:
    """Why v09_int4_wgmma cannot take a case: rows of y must be whole vectors, and rows of W whole groups."""
    return f"needs n to be a multiple of 8, got {case['n']}" if case["n"] % 8 else whole(case)


VECTORS = multiples(n=8, k=16)
FLOAT32 = {"accumulate": ("float32",)}
FP32_SUMS = {"accumulate": ("float32", "promoted")}
WEIGHTS_ONLY = {"format": (*GGUF, *INT4, "fp8"), **FLOAT32}
baselines.register(op, whole)
op.cuda("v01_naive.cu", params=FP32_SUMS, requires=whole)
op.triton("triton_fused.py", params=WEIGHTS_ONLY, requires=whole_blocks)
op.cuda("v02_gemv.cu", params=WEIGHTS_ONLY, requires=fits_gemv, preferred="int4_of_two_rows")
op.cuda("v03_mma.cu", params=FP32_SUMS, requires=pieces, preferred="int4_of_32_rows")
FP8 = {"format": ("fp8_fp8",)}
op.cuda("v04_fp8_mma.cu", archs="sm_89+", params=FP8 | FP32_SUMS, requires=VECTORS)
FAST = FP8 | {"accumulate": ("fast",)}
op.cuda("v05_fp8_wgmma.cu", archs="sm_90a", params=FAST, requires=VECTORS)
op.cuda("v06_fp8_one_wave.cu", archs="sm_90a", params=FAST, requires=fits_one_wave)
op.cuda("v07_stream.cu", params={"format": tuple(INT4), **FLOAT32}, requires=fits_stream)
PROMOTED_SUMS = FP8 | {"accumulate": ("promoted",)}
op.cuda("v08_fp8_promoted.cu", archs="sm_90a", params=PROMOTED_SUMS, requires=VECTORS)
op.cuda(
    "v09_int4_wgmma.cu", archs="sm_90a", params={"format": tuple(INT4), **FLOAT32}, requires=fits_int4_wgmma,
    preferred="more_than_32_rows",
)  # fmt: skip
G128 = {"format": ("int4_g128",), **FLOAT32}
op.cuda("v10_early.cu", archs="sm_90a", params=G128, requires=fits_stream, entries=("constant", "swiglu"), early=True)
op.cuda(
    "v11_fp8_promoted_slices.cu",
    archs="sm_90a",
    params=PROMOTED_SUMS,
    requires=fits_one_wave,
    preferred="fp8_slices",
)
op.cuda("v12_fp8_fitted.cu", archs="sm_90a", params=PROMOTED_SUMS, requires=VECTORS, preferred="fp8_tiles")
op.cpp("cpu_naive.cpp", params=FP32_SUMS, requires=whole)


def fits_function(case: Case) -> str | None:
    """The rule that sums are the function's: promoted where x is fp8, else fp32."""
    wanted = "promoted" if case.params["format"] == "fp8_fp8" else "float32"
    if case.params["accumulate"] != wanted:
        return f"needs accumulate={wanted} for format={case.params['format']}, got {case.params['accumulate']}"
    return whole(case)


op.function(
    "quant_gemm",
    lambda minfer, y, x, w, scales, zeros, x_scales, packed_w, packed_scales: minfer.quant_gemm(
        x, w.flatten(1), name_of(w), *(t if t.numel() else None for t in (scales, zeros)),
        x_scales=x_scales if x_scales.numel() else None, dtype=y.dtype,
    ),
    returns=(0,),
    params=FP32_SUMS,
    requires=fits_function,
)  # fmt: skip
op.draws("quantised_product")
