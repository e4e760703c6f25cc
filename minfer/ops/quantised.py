"""Weights of 8 and 4 bits, as `dequant` and `quant_gemm` take them: formats, byte layouts, values and their tensors.

A weight matrix is (n, k), row-major. `w` holds the bytes of each block of a row, in order: uint8 (n, k / block, bytes).

    q8_0, q4_0, q4_k, q6_k  GGUF's blocks, as a file has them (ggml's `block_q8_0` and so on): scales are within.
    int4_g64, int4_g128     (q - zero) * scale, with a scale and a zero for each group of 64 or 128 weights of a row. q is 0 to
                            15: weight i of a row is the low half of byte i // 2 where i is even, else the high one. `scales`
                            and `zeros` are (n, k / group), of the dtype of the result or of x.
    fp8                     e4m3 * scale, one fp32 scale a row: `w` is float8_e4m3fn (n, k), `scales` (n,).
    fp8_fp8                 the same; in quant_gemm, x is e4m3 as well, with one fp32 scale a row.

docs/dequant.md has the layouts byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minfer.ops.case import Case
from minfer.ops.tensors import Draw, Fill, Spec, Tensors, Undo, floats, given, integers, made_by

Tensor = torch.Tensor


@dataclass(frozen=True)
class Format:
    """block: how many weights of a row share a scale, or lie together. nbytes: what they take in `w`."""

    block: int
    nbytes: int
    scale: float = 0.0  # of random blocks: about this
    places: tuple[int, ...] = ()  # of GGUF's fp16 scales in a block
    first: int = 0  # of the bytes that hold no scale


FORMATS = {
    "q8_0": Format(32, 34, 0.01, (0,), 2),
    "q4_0": Format(32, 18, 0.1, (0,), 2),
    "q4_k": Format(256, 144, 0.002, (0, 2), 4),
    "q6_k": Format(256, 210, 0.0004, (208,)),
    "int4_g64": Format(64, 32),
    "int4_g128": Format(128, 64),
    "fp8": Format(1, 1),
    "fp8_fp8": Format(1, 1),
}
GGUF = ("q8_0", "q4_0", "q4_k", "q6_k")
INT4 = ("int4_g64", "int4_g128")
FP8 = ("fp8", "fp8_fp8")


def format_of(case: Case) -> Format:
    return FORMATS[case.params["format"]]


def whole_blocks(case: Case) -> str | None:
    """The rule that k is whole blocks of the case's format."""
    block = format_of(case).block
    return f"needs k to be a multiple of {block}, got {case['k']}" if case["k"] % block else None


@dataclass(frozen=True)
class Blocks(Fill):
    """Random bytes with sane fp16 scales. Of the uniform ones, which nothing is timed with, some scales are 0 and some
    subnormal."""

    format: Format
    changes = True

    def make(self, tensor: Tensor, made: Tensors, draw: Draw) -> None:
        tensor.random_(0, 256, generator=draw.generator)
        for place in self.format.places:
            scales = draw.floats(tensor.shape[:2], tensor.device) * self.format.scale
            if draw.distribution == "uniform":
                scales[:, 2::5] = 0.0
                scales[1::3] *= 2.0**-14
            tensor[..., place : place + 2] = scales.half()[..., None].view(torch.uint8)

    def change(self, tensor: Tensor, tensors: Tensors, draw: Draw) -> Undo:
        last = min((place for place in self.format.places if place), default=self.format.nbytes)
        byte = draw.random.randrange(self.format.first, last if self.format.first == 0 else self.format.nbytes)
        element = tensor[draw.random.randrange(len(tensor)), draw.random.randrange(tensor.shape[1]), byte]
        before = element.clone()
        element.fill_(draw.random.randrange(256))
        return lambda: element.copy_(before)


def coarse(made: Tensors, draw: Draw, device: torch.device, shape: tuple[int, ...]) -> Tensor:
    """Scales of 5 significant bits, for which (8 - zero) * scale, tinygemm's zero, is exact in bfloat16."""
    mantissa, exponent = torch.frexp(draw.floats(shape, device) * 0.03 + 0.1)
    return torch.ldexp((mantissa * 32).round() / 32, exponent)


def weight_specs(case: Case) -> list[Spec]:
    """`w`, `scales` and `zeros` of a case with the axes n and k."""
    name, form, n, k = case.params["format"], format_of(case), case["n"], case["k"]
    groups = k // form.block
    if name in FP8:
        fill = floats(0.01, 0.05)
        return [
            given("w", n, k, dtype="float8_e4m3fn"),
            given("scales", n, dtype="float32", fill=fill),
            given("zeros", 0),
        ]
    if name in GGUF:
        return [
            given("w", n, groups, form.nbytes, dtype="uint8", fill=Blocks(form)),
            given("scales", 0),
            given("zeros", 0),
        ]
    return [
        given("w", n, groups, form.nbytes, dtype="uint8", fill=integers(0, 256)),
        given("scales", n, groups, fill=made_by(lambda made, draw, device: coarse(made, draw, device, (n, groups)))),
        given("zeros", n, groups, fill=integers(0, 16)),
    ]


def weight_bytes(case: Case) -> float:
    """Of `w`, `scales` and `zeros`."""
    from minfer.ops.tensors import DTYPES

    specs = weight_specs(case)
    return float(sum(spec.numel * DTYPES[spec.dtype or case.dtype].itemsize for spec in specs))


def halves(w: Tensor) -> Tensor:
    """The low and the high half of each byte of the last axis, side by side in a new one before it: (..., 2, bytes)."""
    return torch.stack((w & 15, w >> 4), -2)


def fp16(w: Tensor, place: int, dtype: torch.dtype) -> Tensor:
    """The fp16 number at a place of each block, (n, blocks, 1)."""
    return w[..., place : place + 2].contiguous().view(torch.float16).to(dtype)


def parts(name: str, w: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weights are the difference of these two, (n, k), in the arithmetic of `dtype`; in fp32 each is exact but for int4
    and fp8, where the first is rounded once and the second is 0."""
    nothing = torch.zeros((), dtype=dtype, device=w.device)
    if name in FP8:
        return w.to(dtype) * scales.to(dtype)[:, None], nothing
    if name in INT4:
        q = halves(w).transpose(-1, -2).flatten(-2).to(dtype)
        return ((q - zeros.to(dtype)[..., None]) * scales.to(dtype)[..., None]).flatten(1), nothing
    if name == "q8_0":
        return (w[..., 2:].contiguous().view(torch.int8).to(dtype) * fp16(w, 0, dtype)).flatten(1), nothing
    if name == "q4_0":
        q = halves(w[..., 2:]).flatten(-2).to(dtype) - 8
        return (q * fp16(w, 0, dtype)).flatten(1), nothing
    if name == "q4_k":
        low, high, mixed = w[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
        scale = torch.cat((low & 63, mixed & 15 | low >> 2 & 48), -1).to(dtype)
        least = torch.cat((high & 63, mixed >> 4 | high >> 2 & 48), -1).to(dtype)
        q = halves(w[..., 16:].unflatten(-1, (4, 32))).flatten(-3, -2).to(dtype)  # (n, blocks, 8, 32)
        first = (fp16(w, 0, dtype) * scale)[..., None] * q
        return first.flatten(1), (fp16(w, 2, dtype) * least)[..., None].expand_as(q).flatten(1)
    low = halves(w[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (2, 32)).flatten(-3, -2)  # (n, blocks, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=w.device)[:, None]
    high = w[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    q = (low | high << 4).to(dtype).sub_(32).flatten(-3).unflatten(-1, (16, 16))
    scale = w[..., 192:208].contiguous().view(torch.int8).to(dtype) * fp16(w, 208, dtype)
    return (scale[..., None] * q).flatten(1), nothing


def dequantised(name: str, w: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights (n, k) in the arithmetic of `dtype`. In fp32 they have the bits that the `gguf` package gives."""
    first, second = parts(name, w, scales, zeros, dtype)
    return first - second if second.dim() else first


def name_of(w: Tensor, x: Tensor | None = None) -> str:
    """The format, by the size of `w`'s blocks, which differs from each to each."""
    if w.dtype == torch.float8_e4m3fn:
        return "fp8_fp8" if x is not None and x.dtype == w.dtype else "fp8"
    return next(name for name, form in FORMATS.items() if form.nbytes == w.shape[2])
