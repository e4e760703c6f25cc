"""divergence: a function with a branch, y = 2 x where x > 0 and x + 1 elsewhere, applied to every element of x, (n,), fp32.

`steps` more multiply-adds follow on each side, with other constants: y = (1 - 2^-8) y + 2^-8 where x > 0, and
y = (1 + 2^-8) y - 2^-8 elsewhere. The call `light` has none of them, `heavy` 256. How the two signs lie among neighbours is
the parameter `data`: at `random`, `sorted` by value, or all `positive`.
"""

from __future__ import annotations

import torch

from minfer.ops import GBPS, Case, Draw, Expected, Op, Spec, Tensors, compiled, given, made_by, out, size, within
from minfer.ops.tensors import Undo

RATE = 2.0**-8  # of both sides: (1 -+ RATE) y +- RATE
ROUNDOFF = 2.0**-24


def values(case: Case, draw: Draw, device: torch.device) -> torch.Tensor:
    """x, with its signs as `data` says."""
    drawn = draw.floats((case["n"],), device)
    if case.params["data"] == "positive":
        return drawn.abs_().clamp_min_(2.0**-24)
    return drawn.sort().values if case.params["data"] == "sorted" else drawn


def tensors(case: Case) -> list[Spec]:
    return [
        out("y", case["n"]),
        given("x", case["n"], fill=made_by(lambda made, draw, device: values(case, draw, device))),
    ]


def change(case: Case, tensors: Tensors, draw: Draw) -> Undo:
    """Gives an element another magnitude and the same sign."""
    element = tensors["x"][draw.random.randrange(case["n"])]
    before = element.clone()
    element.copy_(torch.copysign(torch.full_like(before, abs(draw.float()) + 2.0**-24), before))
    return lambda: element.copy_(before)


def reference(case: Case, t: Tensors, steps: int) -> dict[str, Expected]:
    """Both sides have the fixed point 1, so that `steps` of them are y = 1 + (1 -+ RATE)^steps (y0 - 1). Each of the
    steps + 1 roundings is of a number that is at most 1 + growth (1 + |y0|), and grows at most by `growth` after it."""
    x = t["x"]
    value = torch.where(x > 0, 1 + (1 - RATE) ** steps * (2 * x - 1), 1 + (1 + RATE) ** steps * x)
    if steps == 0:
        value = torch.where(x > 0, 2 * x, x + 1)
        return {"y": within(value, value.abs() * ROUNDOFF)}
    growth = torch.where(x > 0, 1.0, (1 + RATE) ** steps)
    largest = 1 + growth * (2 + 2 * x.abs())
    return {"y": within(value, (steps + 1) * ROUNDOFF * growth * largest)}


def closed_form(y: torch.Tensor, x: torch.Tensor, steps: int = 0) -> None:
    """PyTorch, without the steps themselves: what they come to, as the reference has it. It has a light call's work, so
    that a ratio to it says nothing of a heavy one."""
    if steps == 0:
        torch.where(x > 0, 2 * x, x + 1, out=y)
    else:
        torch.where(x > 0, 1 + (1 - RATE) ** steps * (2 * x - 1), 1 + (1 + RATE) ** steps * x, out=y)


def fused(y: torch.Tensor, x: torch.Tensor, steps: int = 0) -> None:
    """A light call for torch.compile to fuse."""
    y.copy_(torch.where(x > 0, 2 * x, x + 1))


op: Op = Op(
    "divergence",
    axes={"n": size(4096)},
    params={"data": ("random", "sorted", "positive")},
    tensors=tensors,
    reference=reference,
    calls={"light": {"steps": 0}, "heavy": {"steps": 256}},
    flops=lambda case: (1.0 + 2.0 * op.call(case)["steps"]) * case["n"],
    arithmetic=lambda case: ("fma", "float32"),
    metric=GBPS,
    change=change,
    odd_shapes=({"n": 1}, {"n": 1000}),
    sizes={"small": [{"n": 33}, {"n": 4096}], "nan": [], "large": [{"n": 1 << 20}, {"n": 100_003}]},
)

FP32 = ("float32",)

op.torch("torch", closed_form, baseline=True, dtypes=FP32)
# Of one case, for it is compiled anew for every size and call, and nothing else of it depends on the data.
op.torch("torch_compile", compiled(fused), dtypes=FP32, params={"data": ("random",), "call": ("light",)})
op.cuda("v01_branchy.cu", dtypes=FP32)
op.cuda("v02_selected.cu", dtypes=FP32)
op.cuda("v03_one_path.cu", dtypes=FP32)
op.cpp("cpu_branchy.cpp", dtypes=FP32)
op.cpp("cpu_one_path.cpp", dtypes=FP32)
