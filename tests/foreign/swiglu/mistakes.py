"""Backward kernels with a gradient too few, or wrong for some gates. `MISTAKES` says what becomes of each: its status, and
words of the message."""

import torch

from minfer import ops

op = ops.get("foreign_swiglu")
MISTAKES = {
    "drops_a_gradient": ("wrong", "100.0% of the output d_up is NaN"),
    "takes_gates_for_positive": ("wrong", "an element of the output d_gate is off"),
}
Tensor = torch.Tensor


def drops_a_gradient(d_gate: Tensor, d_up: Tensor, gate: Tensor, up: Tensor, dy: Tensor) -> None:
    d_gate.copy_(op.kernels["torch_backward"].function(d_gate, d_up, gate, up, dy)[0])


def takes_gates_for_positive(d_gate: Tensor, d_up: Tensor, gate: Tensor, up: Tensor, dy: Tensor) -> None:
    """Only in one of the gradients."""
    d_gate.copy_(op.kernels["torch_backward"].function(d_gate, d_up, gate.abs(), up, dy)[0])
    d_up.copy_(op.kernels["torch_backward"].function(d_gate, d_up, gate, up, dy)[1])


for function in (drops_a_gradient, takes_gates_for_positive):
    op.torch(function.__name__, function, dtypes=("float32",), params={"call": ("backward",)})
