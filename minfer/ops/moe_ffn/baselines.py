"""What PyTorch has for `moe_ffn`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from minfer.ops import compiled, multiples

if TYPE_CHECKING:
    from minfer.ops.op import Op

Tensor = torch.Tensor
silu = torch.nn.functional.silu


def eager(
    out: Tensor, x: Tensor, weights: Tensor, indices: Tensor, offsets: Tensor, order: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:  # fmt: skip
    """The loop over experts as models have it. The host waits for the counts."""
    k, ffn = weights.shape[1], down.shape[2]
    found, begin = x.new_zeros(order.numel(), x.shape[1]), 0
    for expert, end in enumerate(offsets.tolist()):
        if end > begin:
            slots = order[begin:end]
            gate, up = (x[slots // k] @ gate_up[expert].t()).split(ffn, 1)
            found[slots] = (silu(gate) * up) @ down[expert].t()
        begin = end
    here = (indices >= 0) & (indices < len(offsets))
    return weighted(found, torch.where(here, weights, 0.0))


def weighted(found: Tensor, weights: Tensor) -> Tensor:
    """The sum of each token's slots (tokens * k, hidden), times weights (tokens, k)."""
    return (found.view(*weights.shape, -1) * weights.to(found.dtype)[..., None]).sum(1)


def grouped(
    out: Tensor, x: Tensor, weights: Tensor, indices: Tensor, offsets: Tensor, order: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:  # fmt: skip
    """Two grouped products, with x gathered before and the slots put back behind. Every slot must have an expert here, because
    rows behind the last offset get no value."""
    product = torch.nn.functional.grouped_mm
    gate, up = product(x[order // weights.shape[1]], gate_up.transpose(1, 2), offs=offsets).chunk(2, 1)
    y = product(silu(gate) * up, down.transpose(1, 2), offs=offsets)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), dtype=order.dtype, device=order.device)
    return weighted(y[place], weights)


def register(op: Op, routings: tuple[str, ...]) -> None:
    """Grouped products are those of bfloat16: in float16 PyTorch has a loop of its own in their place."""
    rules: dict[str, Any] = {
        "dtypes": ("bfloat16",),
        "params": {"routing": tuple(name for name in routings if name != "elsewhere")},
        "requires": multiples(hidden=8, ffn=8),
    }
    op.torch("torch", grouped, baseline=True, returns=(0,), **rules)
    op.torch("torch_eager", eager, baseline=True, returns=(0,))
    op.torch("torch_compile", compiled(grouped), returns=(0,), **rules)
