"""What arguments of a function are drawn with, from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
Reference = Callable[..., Any]  # takes the same arguments as the function, floats as fp64
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)


class Draw:
    """Draws from one seed."""

    def __init__(self, seed: str, device: str = "cpu") -> None:
        self.rng, self.device = random.Random(seed), device
        self.torch = torch.Generator().manual_seed(self.rng.getrandbits(32))

    def size(self, least: int = 0) -> int:
        return max(least, self.rng.choice((0, 1, 1, 2, 3, 5, 7, 8, 9, 16, 17, 24, 33, 64)))

    def choice(self, *values: Any) -> Any:
        return self.rng.choice(values)

    def floats(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self.torch) * 2 - 1).to(dtype)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """From low up to but not including high."""
        return torch.randint(low, max(high, low + 1), shape, generator=self.torch, dtype=dtype)

    def laid_out(self, x: Tensor) -> Tensor:
        """The same values elsewhere, on the device: dimensions in any order, gaps between them, an offset; NaN or large numbers
        around."""
        order = list(range(x.dim()))
        if self.rng.random() < 0.4:
            self.rng.shuffle(order)
        strides, stride = [0] * x.dim(), self.choice(1, 1, 1, 1, 2, 3)
        for dim in reversed(order):
            strides[dim] = self.choice(0, 1, 3, 1 << 40) if x.shape[dim] == 1 else stride
            if x.shape[dim] != 1:
                stride = stride * max(1, x.shape[dim]) + self.choice(0, 0, 0, 1, 3, 8)
        offset = self.choice(0, 0, 0, 1, 3, 8)
        around = 123 if not x.dtype.is_floating_point else torch.nan
        room = torch.full((offset + stride * 2 + 8,), around).to(x.dtype).to(self.device)
        return (
            room.as_strided(x.shape, strides, offset).copy_(x)
            if x.numel()
            else room.as_strided(x.shape, strides, offset)
        )


Drawn = tuple[dict[str, Any], Reference]
