"""Operands whose rows lie farther apart than they are long."""

from __future__ import annotations

import torch

from minfer.bench.operands import Operands, poison
from minfer.ops import Op


def spaced(op: Op, operands: Operands) -> dict[str, torch.Tensor]:
    """The tensors, those of `op.strided` as parts of wider ones full of poison, each with another row length."""
    made = {}
    for number, spec in enumerate(operands.specs, 1):
        tensor = operands.tensors[spec.name]
        if spec.name not in op.strided:
            made[spec.name] = tensor
            continue
        order = spec.order or tuple(range(tensor.dim()))
        wide = [tensor.shape[axis] for axis in order]
        wide[-1] += max(8, 16 // tensor.element_size()) * number  # rows start at multiples of 16 bytes
        whole = torch.empty(wide, dtype=tensor.dtype, device=tensor.device)
        poison(whole)
        view = whole.permute([order.index(axis) for axis in range(tensor.dim())])
        made[spec.name] = view.narrow(order[-1], 0, tensor.shape[order[-1]]).copy_(tensor)
    return made
