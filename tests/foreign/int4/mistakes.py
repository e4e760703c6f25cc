"""Kernels that dequantise wrongly. `MISTAKES` says what becomes of each: its status, and words of the message."""

import torch

from minfer import ops

op = ops.get("foreign_int4")
MISTAKES = {
    "drops_the_scales": ("wrong", "an element of the output y is off"),
    "swaps_the_nibbles": ("wrong", "an element of the output y is off"),
}


def product(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor) -> None:
    y.copy_(op.kernels["torch"].function(y, x, w, scales))


def drops_the_scales(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor) -> None:
    """All but the first of each row."""
    product(y, x, w, scales[:, :1].expand_as(scales))


def swaps_the_nibbles(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor) -> None:
    product(y, x, w << 4 | w >> 4, scales)


for function in (drops_the_scales, swaps_the_nibbles):
    op.torch(function.__name__, function, dtypes=("float32",))
