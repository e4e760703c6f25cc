"""`moe_ffn`: the feed-forward layer of a mixture of experts as one function of PyTorch, `torch.ops.minfer.moe_ffn`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minfer.functional import library
from minfer.functional.contract import Contract
from minfer.ops.moe_ffn import counts, sorted_slots

Tensor = torch.Tensor
TAKES = Contract(
    "moe_ffn",
    """
    x: float16 | bfloat16 (tokens, hidden)
    weights: float32 (tokens, k)
    indices: int32 (tokens, k)
    down: x (experts, hidden, ffn)
    gate_up: x (experts, 2*ffn, hidden)
    offsets: int32 (experts)
    order: int32 (tokens*k)
    -> x (tokens, hidden)
    """,
)


@library.public
def moe_ffn(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    offsets: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """For each token the sum over its k slots of w (silu(x Wg) * (x Wu)) Wd, with the matrices of the slot's expert: (tokens,
    hidden).

    x: (tokens, hidden), float16 or bfloat16.
    weights, indices: (tokens, k), float32 and int32, the weight and the expert of each slot. An index outside of 0 to experts
        - 1 names an expert elsewhere: its slot adds nothing, so that experts may be spread over several GPUs.
    gate_up: (experts, 2 ffn, hidden) of x's dtype, the rows of Wg and then those of Wu, as `nn.Linear` keeps a weight.
    down: (experts, hidden, ffn) likewise.
    offsets, order: (experts,) and (tokens * k,), int32: the end of each expert's range in the slots sorted by expert, and
        these sorted slots; both as `moe_route` returns them. Left out, indices are sorted here, by several kernels of
        PyTorch.

    Sums are fp32; silu(x Wg) * (x Wu) and the result of each slot are rounded to the dtype. The host checks nothing that it
    would have to wait for the device for: offsets and order that contradict indices give wrong results, but no access out of
    bounds. `best` picks the kernel, which is compiled at its first call. Works under `torch.compile`. It has no backward:
    raises RuntimeError where one would be recorded. Raises ValueError for arguments that do not fit."""
    library.refuse_gradients("moe_ffn", x, weights, gate_up, down)
    found: Tensor = _moe_ffn_op(x, weights, indices, gate_up, down, offsets, order)
    return found


def _moe_ffn(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    down: Tensor,
    offsets: Tensor | None,
    order: Tensor | None,
) -> Tensor:
    out = _fake(x, weights, indices, gate_up, down, offsets, order)
    experts, hidden, ffn = down.shape
    k = weights.shape[1]
    if out.numel() == 0:
        return out
    if 0 in (k, experts, ffn):
        return out.zero_()
    if offsets is None or order is None:
        offsets = counts(indices, experts).cumsum(0, dtype=torch.int32)
        order = sorted_slots(indices, experts).int()
    if (
        ffn == 1
    ):  # Triton compiles an argument of 1 as a constant, which triton_grouped does not take: a column of zeros more
        gate_up, down, ffn = F.pad(gate_up.unflatten(1, (2, 1)), (0, 0, 0, 1)).flatten(1, 2), F.pad(down, (0, 1)), 2
    routing = (t.contiguous() for t in (weights, indices, offsets, order))
    stacks = (library.readable(stack).contiguous() for stack in (gate_up, down))
    shape = {"tokens": x.shape[0], "experts": experts, "k": k, "hidden": hidden, "ffn": ffn}
    library.call("moe_ffn", (out, library.readable(x), *routing, *stacks), x.dtype, shape, {"routing": "uniform"})
    return out


def _fake(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    down: Tensor,
    offsets: Tensor | None,
    order: Tensor | None,
) -> Tensor:
    """An empty result. Raises ValueError for arguments that do not fit."""
    if (offsets is None) != (order is None):
        raise TAKES.error("offsets and order together, or neither", "None for one of them")
    made: Tensor = TAKES.make(x, weights, indices, down, gate_up, offsets, order)
    return made


_moe_ffn_op = library.define(
    "moe_ffn(Tensor x, Tensor weights, Tensor indices, Tensor gate_up, Tensor down, Tensor? offsets, Tensor? order) -> Tensor",
    _moe_ffn,
    _fake,
)
