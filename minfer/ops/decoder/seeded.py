"""Weights and caches of a decoder. Each layer is drawn by itself, from its name, so that the reference can make it again
without having all layers in memory."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch

from minfer.ops.tensors import Draw, Fill, Tensors

Tensor = torch.Tensor


@dataclass(frozen=True)
class Seeded(Fill):
    """Normal values times `scale` plus `shift`; in uint8, pairs of 4-bit values from 1 to 15, which mean -7 to 7. The parts of the first axis are the layers, and each
    layer is drawn from a seed of its own. With `whole` there are no layers. In caches, (layers, batch, slots, ...), the slots
    from `kept` on are NaN."""  # noqa: E501

    name: str
    scale: float
    shift: float = 0.0
    whole: bool = False
    kept: int | None = None

    def make(self, tensor: Tensor, made: Tensors, draw: Draw) -> None:
        for layer, part in enumerate([tensor] if self.whole else tensor):
            self.write(part, layer)

    def write(self, part: Tensor, layer: int = 0) -> None:
        """Write the values of a layer."""
        seed = zlib.crc32(f"{self.name} {layer}".encode())
        generator = torch.Generator(part.device).manual_seed(seed)
        if part.dtype == torch.uint8:
            # From -7 to 7: with -8 their mean is below 0, all tokens' values become alike layer by layer, and rounding decides
            # signs.
            part.random_(1, 16, generator=generator)
            part += 16 * torch.empty_like(part).random_(1, 16, generator=generator)
        else:
            part.normal_(self.shift, self.scale, generator=generator)
        if self.kept is not None:
            part[:, self.kept :] = math.nan


@dataclass(frozen=True)
class Angles(Fill):
    """cos or sin of position * theta ** (-2 i / dim), (positions, dim / 2) float32: rope's table."""

    function: str
    theta: float

    def make(self, tensor: Tensor, made: Tensors, draw: Draw) -> None:
        positions, pairs = tensor.shape
        tensor.copy_(self.values(positions, pairs, tensor.device))

    def values(self, positions: int, pairs: int, device: torch.device) -> Tensor:
        """The table in fp64."""
        frequencies = self.theta ** (-torch.arange(pairs, dtype=torch.float64, device=device) / pairs)
        angles = torch.outer(torch.arange(positions, dtype=torch.float64, device=device), frequencies)
        return angles.cos() if self.function == "cos" else angles.sin()
