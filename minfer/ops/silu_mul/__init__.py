"""silu_mul: y = silu(gate) * up, the gate of Llama's feed-forward block (Shazeer, GLU variants improve transformer, 2020), and
backward: from the gradient dy those of gate and of up.

All tensors are (tokens, hidden) of one dtype, row-major; their rows may lie apart, as those of the two halves of one
(tokens, 2 hidden) projection do. Arithmetic is fp32, and each result is rounded once. Forward and backward have other
tensors, so they are cases of their own (`params.call`), and so are their kernels.
"""

from __future__ import annotations

import torch

from minfer.ops import GBPS, Case, Expected, Op, Spec, Tensors, compiled, given, multiples, out, size, within

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
    """exp(-gate) as a power of two has a relative error of |gate| u for the rounding of its argument, twice that with the
    rounded constant, and some u more; quotient and products are a few roundings. In d_gate two terms cancel where gate is
    about -1.28, so its bound is of their magnitudes."""
    gate, up = t["gate"], t["up"]
    sigmoid, roundings = gate.sigmoid(), 16 + 2 * gate.abs()
    if not backwards(case):
        value = gate * sigmoid * up
        return {"y": within(value, value.abs() * roundings * U)}
    slope = (-gate).sigmoid()
    d_gate, d_up = t["dy"] * up * sigmoid * (1 + gate * slope), t["dy"] * gate * sigmoid
    magnitude = (t["dy"] * up * sigmoid).abs() * (1 + gate.abs() * slope)
    return {"d_gate": within(d_gate, magnitude * roundings * U), "d_up": within(d_up, d_up.abs() * roundings * U)}


def eager(y: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What a PyTorch user writes. silu's result is rounded to the dtype before the product."""
    return torch.nn.functional.silu(gate) * up


def fused(y: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
    """The definition, for torch.compile to fuse."""
    y.copy_((torch.nn.functional.silu(gate.float()) * up.float()).to(y.dtype))


def eager_backward(
    d_gate: torch.Tensor, d_up: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What autograd runs for `eager`, the forward silu that it would have kept included; both gradients in fp32, because a
    half type's would be rounded twice."""
    wide, grad = gate.float(), dy.float()
    d_wide = torch.ops.aten.silu_backward(grad * up.float(), wide)
    return d_wide.to(gate.dtype), (grad * torch.nn.functional.silu(wide)).to(gate.dtype)


def fused_backward(
    d_gate: torch.Tensor, d_up: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor
) -> None:
    """The same, for torch.compile to fuse."""
    for to, gradient in zip((d_gate, d_up), eager_backward(d_gate, d_up, gate, up, dy), strict=True):
        to.copy_(gradient)


def liger(y: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Liger Kernel's, which copies an input whose rows lie apart."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    found: torch.Tensor = LigerSiLUMulFunction.apply(gate, up)
    return found


op = Op(
    "silu_mul",
    axes={"tokens": size(), "hidden": size(1024)},
    tensors=tensors,
    reference=reference,
    calls={"forward": {}, "backward": {}},
    flops=lambda case: (12.0 if backwards(case) else 5.0) * case["tokens"] * case["hidden"],
    arithmetic=lambda case: ("fma", "float32"),
    metric=GBPS,
    strided=("y", "d_gate", "d_up", "gate", "up", "dy"),
    odd_shapes=({"tokens": 3, "hidden": 1000}, {"tokens": 1, "hidden": 77}),
    sizes={
        "small": [
            {"tokens": 1, "hidden": 1},
            {"tokens": 5, "hidden": 8},
            {"tokens": 130, "hidden": 136},
            {"tokens": 2, "hidden": 4104},
        ],
        "large": [
            {"tokens": 128, "hidden": 14336},
            {"tokens": 2049, "hidden": 14336},
            {"tokens": 70000, "hidden": 264},
        ],
    },
)

ALL = ("float32", "float16", "bfloat16")
VECTORS = multiples(hidden=8)  # rows of 16-byte pieces
FORWARD, BACKWARD = {"call": ("forward",)}, {"call": ("backward",)}


op.torch("torch", eager, baseline=True, returns=(0,), dtypes=ALL, params=FORWARD)
op.torch("torch_backward", eager_backward, baseline=True, returns=(0, 1), dtypes=ALL, params=BACKWARD)
op.torch("torch_compile", compiled(fused), dtypes=ALL, params=FORWARD)
op.torch("torch_compile_backward", compiled(fused_backward), dtypes=ALL, params=BACKWARD)
op.peer("liger", liger, package="liger_kernel", returns=(0,), dtypes=ALL, params=FORWARD)
op.cuda("v01_naive.cu", dtypes=ALL, params=FORWARD)
op.cuda("v01_naive.cu", name="v01_naive_backward", dtypes=ALL, params=BACKWARD)
op.cuda("v02_vectors.cu", dtypes=ALL, requires=VECTORS, params=FORWARD)
op.cuda("v02_vectors.cu", name="v02_vectors_backward", dtypes=ALL, requires=VECTORS, params=BACKWARD)
op.triton("triton_blocks.py", dtypes=ALL, params=FORWARD)
op.triton("triton_blocks_backward.py", dtypes=ALL, params=BACKWARD)
op.cpp("cpu_loops.cpp", dtypes=ALL, params=FORWARD)
op.cpp("cpu_loops.cpp", name="cpu_loops_backward", dtypes=ALL, params=BACKWARD)
op.function("silu_mul", lambda minfer, y, gate, up: minfer.silu_mul(gate, up), returns=(0,), dtypes=ALL, params=FORWARD)
op.draws("ffn_rows")
