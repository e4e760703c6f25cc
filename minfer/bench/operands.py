"""Tensors to run kernels on: random operands and poisoned outputs, each with guard zones around it."""

from __future__ import annotations

import torch

GUARD = 4096  # elements before and after each tensor; a multiple of every alignment that kernels ask for

# NaN as float16, as bfloat16 and, twice over, as float32: whoever reads a guard computes NaN, whoever writes it is seen.
POISON = 0x7FA5


class Operands:
    """Allocates the tensors of one problem, from one seed; the same seed makes the same values in the same order.

    `distribution` is "uniform" on [-1, 1], or "normal"."""

    def __init__(self, seed: int, distribution: str, dtype: torch.dtype, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.distribution, self.dtype, self.device = distribution, dtype, device
        self._guarded: list[tuple[torch.Tensor, int]] = []

    def rand(self, *shape: int) -> torch.Tensor:
        """The next random tensor, row-major."""
        values = torch.empty(shape, dtype=torch.float32, device=self.device)
        if self.distribution == "uniform":
            values.uniform_(-1, 1, generator=self.generator)
        else:
            values.normal_(generator=self.generator)
        return self.poisoned(*shape).copy_(values)

    def poisoned(self, *shape: int) -> torch.Tensor:
        """A tensor full of NaN, for a kernel to write."""
        numel = torch.Size(shape).numel()
        words = self.dtype.itemsize // 2
        whole = torch.full(((numel + 2 * GUARD) * words,), POISON, dtype=torch.int16, device=self.device)
        self._guarded.append((whole, GUARD * words))
        return whole.view(self.dtype)[GUARD : GUARD + numel].view(shape)

    def breached(self) -> bool:
        """Whether anything was written outside the tensors."""
        edges = [edge for whole, guard in self._guarded for edge in (whole[:guard], whole[-guard:])]
        return any(bool((edge != POISON).any()) for edge in edges)


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with NaN, so that what is not written shows."""
    tensor.fill_(float("nan"))
