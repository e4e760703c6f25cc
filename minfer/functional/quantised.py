"""`dequant` and `quant_gemm`: kernels for weights of 8 and 4 bits as functions of PyTorch, `torch.ops.minfer.<name>`."""

from __future__ import annotations

from functools import cache

import torch

from minfer.functional import library
from minfer.functional.contract import Contract
from minfer.ops.quantised import FORMATS, FP8, GGUF, INT4

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn
PRODUCT = {"layout": "TN", "accumulate": "float32"}
# Above this number of rows, GGUF's weights, and those in fp8 beside an x of 16 bits, are dequantised first on Hopper. On an
# H200 300 x 16384 x 3072 with q8_0 took 301 us in one kernel.
MOST_ROWS = 64


@library.public
def dequant(
    w: Tensor,
    format: str,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """The weights as a new contiguous (n, k) tensor of `dtype`: float32, float16 or bfloat16.

    format: "q8_0", "q4_0", "q4_k" or "q6_k", GGUF's blocks; "int4_g64" or "int4_g128"; or "fp8".
    w: uint8 (n, bytes of a row): GGUF's blocks as in a file; int4 with two weights in a byte, the first in the low half. Or
        float8_e4m3fn (n, k).
    scales: int4: (n, k / group) of `dtype`; fp8: float32 (n,). GGUF's blocks contain theirs.
    zeros: int4: of the dtype and shape of scales, 8 by default. A weight is (q - zero) * scale.

    Arithmetic is fp32 and the result is rounded once; as float32, GGUF's blocks give the bits that the `gguf` package gives.
    Works under `torch.compile`; it has no backward: raises RuntimeError where one would be recorded. Raises ValueError for
    arguments that do not fit."""
    library.refuse_gradients("dequant", scales, zeros)
    found: Tensor = _dequant_op(w, format, scales, zeros, dtype)
    return found


@library.public
def quant_gemm(
    x: Tensor,
    w: Tensor,
    format: str,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    *,
    x_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ Wᵀ, (..., n) from x (..., k), with the weights W of `dequant`.

    x: float16 or bfloat16, which is also `dtype`, that of the result. Or float8_e4m3fn with fp8 weights and `x_scales`,
        float32 of the shape of x without its last dimension; then `dtype` is bfloat16 by default.
    format, w, scales, zeros: as `dequant` has them; int4's scales and zeros are of the dtype of x.

    On Hopper, a product of more than 64 rows takes two steps for GGUF's blocks, and for fp8 weights with an x of 16 bits: it
    writes the weights to a temporary tensor (n, k), rounded to dtype, and multiplies with that. One kernel does it all where
    there is no memory for this tensor.

    Sums are fp32 and the result is rounded once. Where x is float8_e4m3fn, the tensor cores may sum up to 128 products with
    about 13 bits, and these sums are added in fp32 (`accumulate=promoted`). Works under `torch.compile`; it has no backward:
    raises RuntimeError where one would be recorded. Raises ValueError for arguments that do not fit."""
    library.refuse_gradients("quant_gemm", x, scales, zeros, x_scales)
    found: Tensor = _quant_gemm_op(x, w, format, scales, zeros, x_scales, dtype)
    return found


def _operands(
    w: Tensor, form: str, scales: Tensor | None, zeros: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """w in blocks, scales and zeros as the kernels take them."""
    nothing = w.new_empty(0, dtype=dtype)
    blocks = w if form in FP8 else w.reshape(w.shape[0], -1, FORMATS[form].nbytes)
    if form in GGUF or scales is None:
        return blocks.contiguous(), nothing, nothing
    if form in FP8:
        return blocks.contiguous(), scales.contiguous(), nothing
    zeros = torch.full_like(scales, 8.0) if zeros is None else zeros
    return blocks.contiguous(), scales.contiguous(), zeros.contiguous()


def _dequant(w: Tensor, format: str, scales: Tensor | None, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = _fake_dequant(w, format, scales, zeros, dtype)
    if y.numel():
        shape = {"n": y.shape[0], "k": y.shape[1]}
        operands = _operands(w, format, scales, zeros, dtype)
        library.call("dequant", (y, *operands), dtype, shape, {"format": format})
    return y


def _quant_gemm(
    x: Tensor, w: Tensor, format: str, scales: Tensor | None, zeros: Tensor | None, x_scales: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    y = _fake_quant_gemm(x, w, format, scales, zeros, x_scales, dtype)
    if not y.numel():
        return y
    k = x.shape[-1]
    if not k:
        return y.zero_()
    rows, out = x.reshape(-1, k).contiguous(), y.view(-1, y.shape[-1])
    if rows.data_ptr() % 16:
        rows = rows.clone()
    both = x.dtype == E4M3
    nothing = x.new_empty(0, dtype=torch.float32)
    of_x = nothing if x_scales is None else x_scales.reshape(-1).contiguous()
    params = {"format": "fp8_fp8", "accumulate": "promoted"} if both else {"format": format, "accumulate": "float32"}
    operands = _operands(w, format, scales, zeros, y.dtype)
    shape = {"m": len(rows), "n": y.shape[-1], "k": k}
    many = not both and format not in INT4 and len(rows) > MOST_ROWS and library.capability_of(x) == (9, 0)
    if many and (weights := _temporary(x, shape["n"], k)) is not None:
        library.call("dequant", (weights, *operands), y.dtype, {"n": shape["n"], "k": k}, {"format": format})
        library.call("hgemm", (out, rows, weights.t()), y.dtype, shape, PRODUCT, alpha=1.0, beta=0.0)
        library.note("quant_gemm", y.dtype, shape, params, "dequant and matmul, because there are many rows")
    else:
        library.call("quant_gemm", (out, rows, *operands, of_x, nothing, nothing), y.dtype, shape, params)
    return y


def _temporary(like: Tensor, n: int, k: int) -> Tensor | None:
    """A tensor (n, k), or None if there is no memory for it."""
    try:
        return like.new_empty(n, k)
    except torch.OutOfMemoryError:
        return None


def _fake_dequant(w: Tensor, format: str, scales: Tensor | None, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    if dtype not in (torch.float32, *HALVES):
        raise ValueError(f"minfer.dequant takes a dtype of float32, float16 or bfloat16, got {dtype}")
    made: Tensor = _check("dequant", format, scales, zeros, dtype).make(w, scales, zeros)
    return made


def _fake_quant_gemm(
    x: Tensor, w: Tensor, format: str, scales: Tensor | None, zeros: Tensor | None, x_scales: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    both = x.dtype == E4M3
    made = (dtype or torch.bfloat16) if both else (dtype or x.dtype)
    contract = _check("quant_gemm", format, scales, zeros, made if made in HALVES else torch.float16, both)
    if both and format != "fp8":
        raise contract.error("x of float8_e4m3fn with the format fp8 only", format)
    if x.dtype in (*HALVES, E4M3) and (made not in HALVES or (not both and made != x.dtype)):
        raise contract.error(f"a dtype of {'float16 or bfloat16' if both else f'that of x, {x.dtype}'}", dtype)
    if both != (x_scales is not None):
        raise contract.error("x_scales with x of float8_e4m3fn, and only then", "None" if both else "a tensor")
    found: Tensor = contract.make(w, scales, zeros, x, x_scales)
    return found


def _check(
    function: str, form: str, scales: Tensor | None, zeros: Tensor | None, dtype: torch.dtype, both: bool = False
) -> Contract:
    """The contract for a format. Raises ValueError for scales or zeros too few or too many."""
    names = tuple(name for name in FORMATS if name != "fp8_fp8")
    if form not in names:
        raise ValueError(f"minfer.{function} takes a format of {', '.join(names)}, got {form!r}")
    contract = _contract(function, form, dtype, both)
    if scales is None and form not in GGUF:
        raise contract.error(f"scales with the format {form}", "None")
    if scales is not None and form in GGUF:
        raise contract.error(f"no scales with the format {form}", "a tensor")
    if zeros is not None and form not in INT4:
        raise contract.error(f"no zeros with the format {form}", "a tensor")
    return contract


@cache
def _contract(function: str, form: str, dtype: torch.dtype, both: bool) -> Contract:
    """`both`: x is of float8_e4m3fn, too."""
    block, nbytes = (32, 32) if form == "fp8" else (FORMATS[form].block, FORMATS[form].nbytes)
    made = str(dtype).removeprefix("torch.")
    w, scales = ("float8_e4m3fn", "float32 (n)") if form == "fp8" else ("uint8", f"{made} (n, blocks)")
    table = f"""
        w: {w} (n, {nbytes}*blocks)
        scales: {scales}
        zeros: {scales}
        """
    if function == "dequant":
        return Contract(function, f"{table.rstrip()}\n-> {made} (n, {block}*blocks)")
    takes = "float8_e4m3fn" if both else "float16 | bfloat16 | float8_e4m3fn"
    return Contract(
        function,
        f"""{table.rstrip()}
        x: {takes} (..., {block}*blocks)
        x_scales: float32 (...)
        -> {made} (..., n)
        """,
    )


_dequant_op = library.define(
    "dequant(Tensor w, str format, Tensor? scales, Tensor? zeros, ScalarType dtype) -> Tensor", _dequant, _fake_dequant
)
_quant_gemm_op = library.define(
    "quant_gemm(Tensor x, Tensor w, str format, Tensor? scales, Tensor? zeros, Tensor? x_scales, ScalarType? dtype) -> Tensor",
    _quant_gemm,
    _fake_quant_gemm,
)
