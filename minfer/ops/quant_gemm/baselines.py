"""What PyTorch has for `quant_gemm`: dequantise and multiply, tinygemm, and `_scaled_mm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minfer.ops.case import Case, Rule, both, multiples
from minfer.ops.quantised import FORMATS, INT4, dequantised, name_of
from minfer.ops.tensors import Draw, Tensors

if TYPE_CHECKING:
    from minfer.ops.op import Op

Tensor = torch.Tensor
INNER = 8  # of tinygemm: tiles of 16 in k that a lane's loads bring at once
ALIGNED = multiples(n=32, k=128)


def tinygemm_groups(case: Case) -> int:
    """How many groups a row has in a case that tinygemm takes, else 0."""
    fits = case.params["format"] in INT4 and case.dtype == "bfloat16" and not ALIGNED(case)
    return case["k"] // FORMATS[case.params["format"]].block if fits else 0


def packed_weights(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
    """`w` in tinygemm's layout, as bytes."""
    w = made["w"].flatten(1) if made["w"].dim() == 3 else made["w"]
    if not made_for_tinygemm(made):
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        nibbles = torch.stack((w & 15, w >> 4), -1).flatten(1).int()
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, INNER).flatten().view(torch.uint8)
    return torch.ops.aten._convert_weight_to_int4pack(w << 4 | w >> 4, INNER).flatten().view(torch.uint8)


def packed_scales(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
    """scale and (8 - zero) * scale: tinygemm's weight is (q - 8) * scale + zero."""
    if not made_for_tinygemm(made):
        return torch.empty(0, 0, 2, device=device)
    scales, zeros = (made[name].float() for name in ("scales", "zeros"))
    return torch.stack((scales, (8 - zeros) * scales), -1).transpose(0, 1)


def made_for_tinygemm(made: Tensors) -> bool:
    w = made["w"]
    if w.dim() != 3 or w.shape[2] not in (32, 64) or made["scales"].dtype != torch.bfloat16:
        return False
    return w.shape[0] % 32 == 0 and w.shape[1] * w.shape[2] % 64 == 0


def eager(
    y: Tensor, x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor, x_scales: Tensor, packed_w: Tensor, packed_scales: Tensor
) -> Tensor:  # fmt: skip
    """Dequantises to memory, in the dtype of x, and multiplies; in fp32 where x is fp8."""
    name = name_of(w, x)
    if name == "fp8_fp8":
        return (x.float() * x_scales[:, None] @ dequantised(name, w, scales, zeros).T).to(y.dtype)
    return x @ dequantised(name, w, scales, zeros).to(x.dtype).T


def tinygemm(
    y: Tensor, x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor, x_scales: Tensor, packed_w: Tensor, packed_scales: Tensor
) -> Tensor:  # fmt: skip
    """PyTorch's int4 kernel, which has its own layout of the weights."""
    group = 2 * w.shape[2]
    if x.device.type == "cpu":
        packed = packed_w.view(w.shape[0], -1)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, packed_scales)
    packed = packed_w.view(torch.int32).view(w.shape[0] // 8, -1, 32, INNER // 2)
    return torch.ops.aten._weight_int4pack_mm(x, packed, group, packed_scales)


def scaled_mm(x: Tensor, w: Tensor, scales: Tensor, x_scales: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return torch._scaled_mm(
        x, w.t(), scale_a=x_scales[:, None], scale_b=scales[None], out_dtype=dtype, use_fast_accum=fast
    )


def scaled(
    y: Tensor, x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor, x_scales: Tensor, packed_w: Tensor, packed_scales: Tensor
) -> Tensor:  # fmt: skip
    """`_scaled_mm` by default: the tensor cores sum some products, and these sums are added up in fp32."""
    return scaled_mm(x, w, scales, x_scales, y.dtype, False)


def scaled_fast(
    y: Tensor, x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor, x_scales: Tensor, packed_w: Tensor, packed_scales: Tensor
) -> Tensor:  # fmt: skip
    """`_scaled_mm` with the tensor cores' sums."""
    return scaled_mm(x, w, scales, x_scales, y.dtype, True)


def register(op: Op, rule: Rule) -> None:
    """Ratios are against PyTorch's own kernel where it takes a case, else against the two steps."""
    int4 = {"format": INT4, "accumulate": ("float32",)}
    fp8 = {"format": ("fp8_fp8",)}
    pieces = both(rule, multiples(n=16, k=16))
    op.torch(
        "tinygemm",
        tinygemm,
        baseline=True,
        returns=(0,),
        dtypes=("bfloat16",),
        params=int4,
        requires=both(rule, ALIGNED),
    )
    for name, function, accumulate in (("scaled_mm", scaled, "promoted"), ("scaled_mm_fast", scaled_fast, "fast")):
        op.torch(
            name, function, baseline=True, returns=(0,), dtypes=("bfloat16",),
            params=fp8 | {"accumulate": (accumulate,)}, requires=pieces,
        )  # fmt: skip
    op.torch("torch", eager, baseline=True, returns=(0,), requires=rule)
