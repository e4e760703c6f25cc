"""y = silu(gate) * up, and backward: from the gradient dy those of gate and of up. The two calls have other tensors, so they
are cases of their own, and so are their kernels."""

from __future__ import annotations

import torch

from minfer.ops import GBPS, Case, Expected, Op, Spec, Tensors, given, out, rounded, size, within

U = 2.0**-24


def backwards(case: Case) -> bool:
    return op.call_name(case) == "backward"


def tensors(case: Case) -> list[Spec]:
    shape = case["tokens"], case["hidden"]
    inputs = [given("gate", *shape), given("up", *shape)]
    if backwards(case):
        return [out("d_gate", *shape), out("d_up", *shape), *inputs, given("dy", *shape)]
    return [out("y", *shape), *inputs]


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """exp(-gate) is off by |gate| u for the rounding of its argument, and by some u more. In d_gate, two terms cancel where
    gate is about -1.28; so its bound is of their magnitudes."""
    gate, up = t["gate"], t["up"]
    sigmoid, roundings = gate.sigmoid(), 16 + 2 * gate.abs()
    silu = gate * sigmoid
    if not backwards(case):
        return {"y": rounded(silu * up, roundings)}
    d_gate = t["dy"] * up * sigmoid * (1 + gate * (1 - sigmoid))
    magnitude = (t["dy"] * up * sigmoid).abs() * (1 + gate.abs() * (1 - sigmoid))
    return {"d_gate": within(d_gate, magnitude * roundings * U), "d_up": rounded(t["dy"] * silu, roundings)}


def eager(y: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def eager_backward(
    d_gate: torch.Tensor, d_up: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, grad = gate.float(), dy.float()
    d_wide = torch.ops.aten.silu_backward(grad * up.float(), wide)
    return d_wide.to(gate.dtype), (grad * torch.nn.functional.silu(wide)).to(gate.dtype)


op = Op(
    "foreign_swiglu",
    axes={"tokens": size(64), "hidden": size(512)},
    tensors=tensors,
    reference=reference,
    calls={"forward": {}, "backward": {}},
    flops=lambda case: (12.0 if backwards(case) else 5.0) * case["tokens"] * case["hidden"],
    arithmetic=lambda case: ("fma", "float32"),
    metric=GBPS,
    odd_shapes=({"tokens": 3, "hidden": 77},),
    sizes={"small": [{"tokens": 1, "hidden": 1}]},
)

ALL = ("float32", "float16", "bfloat16")
FORWARD, BACKWARD = {"call": ("forward",)}, {"call": ("backward",)}
op.torch("torch", eager, baseline=True, returns=(0,), dtypes=ALL, params=FORWARD)
op.torch("torch_backward", eager_backward, baseline=True, returns=(0, 1), dtypes=ALL, params=BACKWARD)
op.cpp("loops.cpp", name="loops", dtypes=ALL, params=FORWARD)
op.cpp("loops.cpp", name="loops_backward", dtypes=ALL, params=BACKWARD)
op.cuda("threads.cu", name="threads", dtypes=ALL, params=FORWARD)
op.cuda("threads.cu", name="threads_backward", dtypes=ALL, params=BACKWARD)
