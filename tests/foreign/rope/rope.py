"""RoPE in place on q and k: each pair (x[i], x[i + head_dim / 2]) of a head is rotated by position * 10000^(-2i / head_dim)
(Su et al., RoFormer, 2021; pairs of halves, as in GPT-NeoX and Llama). Angles are fp32, results are rounded once."""

from __future__ import annotations

import torch

from minfer.ops import (
    Case,
    Expected,
    Op,
    Spec,
    Tensors,
    divides,
    given,
    inout,
    integers,
    one_of,
    size,
    tokens_per_second,
    within,
)

BASE, LONGEST = 10000.0, 8192
U = 2.0**-24


def tensors(case: Case) -> list[Spec]:
    tokens, dim = case["tokens"], case["head_dim"]
    return [
        inout("q", tokens, case["heads"], dim),
        inout("k", tokens, case["kv_heads"], dim),
        given("positions", tokens, dtype="int32", fill=integers(0, LONGEST)),
    ]


def angles(positions: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """(tokens, 1, dim / 2)."""
    frequency = BASE ** (torch.arange(0, dim, 2, device=positions.device).to(dtype) / -dim)
    return positions[:, None, None].to(dtype) * frequency


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """A frequency by exp2 in fp32 is off by 20 u relative, and so is the angle, by which a pair turns too far."""
    angle = angles(t["positions"], case["head_dim"], torch.float64)

    def turned(x: torch.Tensor) -> Expected:
        first, second = x.chunk(2, -1)
        slack = (first.abs() + second.abs()) * (32 * U * angle + 4 * U)
        return within(rotated(x, angle), torch.cat([slack, slack], -1))

    return {"q": turned(t["q"]), "k": turned(t["k"])}


def eager(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As a model in PyTorch does it: into new tensors."""
    angle = angles(positions, q.shape[2], torch.float32)
    return rotated(q.float(), angle).to(q.dtype), rotated(k.float(), angle).to(k.dtype)


op = Op(
    "foreign_rope",
    axes={"tokens": size(), "heads": size(16), "kv_heads": divides("heads"), "head_dim": one_of(64, 128)},
    tensors=tensors,
    reference=reference,
    flops=lambda case: 3.0 * case["tokens"] * (case["heads"] + case["kv_heads"]) * case["head_dim"],
    arithmetic=lambda case: ("fma", "float32"),
    metric=tokens_per_second(lambda case: case["tokens"]),
    odd_shapes=({"tokens": 3, "heads": 6, "kv_heads": 2, "head_dim": 64},),
    sizes={"small": [{"tokens": 1, "heads": 1, "kv_heads": 1, "head_dim": 128}]},
)

ALL = ("float32", "float16", "bfloat16")
op.torch("torch", eager, baseline=True, returns=(0, 1), dtypes=ALL)
op.cpp("loops.cpp", dtypes=ALL)
op.cuda("threads.cu", dtypes=ALL)
