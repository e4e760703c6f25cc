"""`silu_mul`: the kernels of silu_mul as one function of PyTorch, `torch.ops.minfer.silu_mul`, with a backward."""

from __future__ import annotations

from typing import Any

import torch

from minfer.functional import library
from minfer.functional.contract import Contract

TENSORS = """
    gate: float32 | float16 | bfloat16 (..., hidden)
    up: gate (..., hidden)"""
TAKES = Contract("silu_mul", f"{TENSORS}\n-> gate (..., hidden)")
BACKWARD = Contract(
    "silu_mul",
    f"""{TENSORS}
    dy: gate (..., hidden)
    -> gate (..., hidden)
    -> gate (..., hidden)
    """,
)


@library.public
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, a new contiguous tensor, of two tensors of one shape (..., hidden), dtype and device.

    float32, float16 or bfloat16; arithmetic is fp32 and the result is rounded once. `gate` and `up` may be the halves of one
    projection, `projection.chunk(2, -1)`: they are read in place. What a kernel cannot read, such as rows that do not
    start at multiples of 16 bytes, is copied first. `best` picks the kernel, which is compiled at its first call. Works under
    `torch.compile` and autograd; its backward is an op too, `torch.ops.minfer.silu_mul_backward`. Second derivatives raise
    RuntimeError. Raises ValueError for tensors that do not fit each other."""
    return _silu_mul_op(gate, up)


def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = TAKES.make(gate, up)
    _call((y,), (gate, up), {})
    return y


def _backward(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    d_gate, d_up = BACKWARD.make(gate, up, dy)
    _call((d_gate, d_up), (gate, up, dy), {"call": "backward"})
    return d_gate, d_up


def _call(written: tuple[torch.Tensor, ...], read: tuple[torch.Tensor, ...], params: dict[str, str]) -> None:
    if written[0].numel() == 0:
        return
    hidden = written[0].shape[-1]
    rows = [library.readable(tensor.reshape(-1, hidden)) for tensor in read]
    outputs = [tensor.view(-1, hidden) for tensor in written]
    shape = {"tokens": len(rows[0]), "hidden": hidden}
    library.call("silu_mul", (*outputs, *rows), written[0].dtype, shape, params)


def _save(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.minfer.silu_mul_backward.default(*ctx.saved_tensors, dy)
    return found


_silu_mul_op = library.define("silu_mul(Tensor gate, Tensor up) -> Tensor", _forward, TAKES.make)
library.define("silu_mul_backward(Tensor gate, Tensor up, Tensor dy) -> (Tensor, Tensor)", _backward, BACKWARD.make)
torch.library.register_autograd("minfer::silu_mul", _differentiate, setup_context=_save, lib=library.LIBRARY)
library.refuse_second_derivatives("silu_mul")
