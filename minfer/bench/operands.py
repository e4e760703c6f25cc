"""The tensors of a case: made from a seed, outputs poisoned, each with guard zones around it."""

from __future__ import annotations

import random

import torch

from minfer.ops import DTYPES, Case, Draw, Op, Spec, Tensors
from minfer.ops.tensors import Undo

GUARD_BYTES = 16384  # before and after each tensor; a multiple of every alignment that kernels ask for

# NaN as float16, as bfloat16 and, twice over, as float32; a large number as an integer. Whoever reads a guard computes
# NaN or an index out of bounds, and whoever writes it is seen. A byte of it, 0x7F, is NaN in both fp8 formats.
POISON, POISON_BYTE = 0x7FA5, 0x7F


class Operands:
    """The tensors of one case by name, in the op's order. The same seed makes the same values, on the same kind of device.

    `distribution` is that of floats: "uniform" on [-1, 1], or "normal"."""

    def __init__(self, op: Op, case: Case, seed: int, distribution: str, device: torch.device) -> None:
        self.op, self.case, self.distribution = op, case, distribution
        self.specs = op.specs(case)
        self._guarded: list[torch.Tensor] = []
        self.tensors = {spec.name: self._allocate(spec, device) for spec in self.specs}
        self.fill(seed)

    def fill(self, seed: int) -> None:
        """Make all values anew, in place."""
        device = next(iter(self.tensors.values())).device
        draw = Draw(torch.Generator(device).manual_seed(seed), random.Random(seed), self.distribution)
        made: dict[str, torch.Tensor] = {}
        for spec in self.specs:
            tensor = made[spec.name] = self.tensors[spec.name]
            if spec.role == "out":
                poison(tensor)
            else:
                spec.fill.make(tensor, made, draw)

    def _allocate(self, spec: Spec, device: torch.device) -> torch.Tensor:
        whole = torch.empty(2 * GUARD_BYTES + spec.nbytes, dtype=torch.uint8, device=device)
        for edge in (whole[:GUARD_BYTES], whole[-GUARD_BYTES:]):
            guard(edge)
            self._guarded.append(edge)
        return spec.view(whole[GUARD_BYTES : GUARD_BYTES + spec.nbytes].view(DTYPES[spec.dtype]))

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What a kernel is called with."""
        return tuple(self.tensors.values())

    def named(self, *roles: str) -> dict[str, torch.Tensor]:
        """The tensors of these roles."""
        return {spec.name: self.tensors[spec.name] for spec in self.specs if spec.role in roles}

    def breached(self) -> bool:
        """Whether anything was written outside the tensors."""
        return any(breached(edge) for edge in self._guarded)


def change(op: Op, case: Case, tensors: Tensors, seed: int, distribution: str) -> Undo:
    """Change the inputs of a timed round a little, in place, by the seed; returns what takes it back."""
    if not tensors:
        return lambda: None
    rng, device = random.Random(seed), next(iter(tensors.values())).device
    draw = Draw(torch.Generator(device).manual_seed(seed), rng, distribution)
    if op.change is not None:
        return op.change(case, tensors, draw)
    chosen = [s for s in op.specs(case) if s.role != "out" and s.fill.changes and s.numel]
    if not chosen:
        return lambda: None
    spec = rng.choice(chosen)
    return spec.fill.change(tensors[spec.name], tensors, draw)


def guard(edge: torch.Tensor) -> None:
    """Fill bytes with poison."""
    edge[0::2], edge[1::2] = POISON & 0xFF, POISON >> 8


def breached(edge: torch.Tensor) -> bool:
    """Whether a guard's bytes were written."""
    return bool((edge[0::2] != POISON & 0xFF).any() | (edge[1::2] != POISON >> 8).any())


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor so that what is not written shows: NaN, or a large integer."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor.fill_(float("nan"))
    elif tensor.element_size() > 1:
        tensor.fill_(torch.iinfo(tensor.dtype).max - 0x5A)
    else:
        tensor.view(torch.uint8).fill_(POISON_BYTE)
