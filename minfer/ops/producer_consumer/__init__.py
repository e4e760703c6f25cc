"""producer_consumer: work that streams, y = f(x) for every element of x, (n,), fp32, and three ways to have the next
tile on its way while one is computed.

f is `steps` times y = (1 - 2^-8) y + 2^-8. The call `balanced` has 64 of them, which on an H200 take about as long as the
element's way from and to memory; `light` has 8.
"""

from __future__ import annotations

import torch

from minfer.ops import GBPS, Case, Expected, Op, Spec, Tensors, compiled, given, multiples, out, size, within

RATE = 2.0**-8
ROUNDOFF = 2.0**-24


def tensors(case: Case) -> list[Spec]:
    return [out("y", case["n"]), given("x", case["n"])]


def reference(case: Case, t: Tensors, steps: int) -> dict[str, Expected]:
    """The fixed point is 1. Each step rounds once, a number of at most 2 + |x|, and later steps make an error smaller."""
    x = t["x"]
    return {"y": within(1 + (1 - RATE) ** steps * (x - 1), steps * ROUNDOFF * (2 + x.abs()))}


def closed_form(y: torch.Tensor, x: torch.Tensor, steps: int = 64) -> None:
    """PyTorch, without the steps: what they come to. Its time is memory's, and a ratio to it says little."""
    torch.add(x - 1, 1 / (1 - RATE) ** steps, out=y).mul_((1 - RATE) ** steps)


def fused(y: torch.Tensor, x: torch.Tensor, steps: int = 64) -> None:
    """The same for torch.compile to fuse: the least that memory allows."""
    y.copy_(1 + (1 - RATE) ** steps * (x - 1))


op: Op = Op(
    "producer_consumer",
    axes={"n": size(20_000)},
    tensors=tensors,
    reference=reference,
    calls={"balanced": {"steps": 64}, "light": {"steps": 8}},
    flops=lambda case: 2.0 * op.call(case)["steps"] * case["n"],
    arithmetic=lambda case: ("fma", "float32"),
    metric=GBPS,
    odd_shapes=({"n": 8}, {"n": 5000}),
    sizes={"small": [{"n": 2048}, {"n": 2052}, {"n": 9000}, {"n": 20_000}], "nan": [], "large": [{"n": 1 << 22}]},
)

FP32 = ("float32",)
VECTORS = multiples(n=4)  # 16-byte pieces

op.torch("torch", closed_form, baseline=True, dtypes=FP32)
op.torch("torch_compile", compiled(fused), dtypes=FP32, params={"call": ("balanced",)})
for rung in ("v01_waits", "v02_every_warp", "v03_producer"):
    op.cuda(f"{rung}.cu", dtypes=FP32, requires=VECTORS)
op.cpp("cpu_loops.cpp", dtypes=FP32)
