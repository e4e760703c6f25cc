"""`moe_ffn`: the feed-forward layer of a mixture of experts as one function of PyTorch, `torch.ops.minfer.moe_ffn`."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.ops.moe_ffn import counts, sorted_slots

Tensor = torch.Tensor


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

    def refuse(takes: str, got: object) -> ValueError:
        return ValueError(f"minfer.moe_ffn takes {takes}, got {got}")

    if x.dtype not in (torch.float16, torch.bfloat16):
        raise refuse("x of float16 or bfloat16", x.dtype)
    if x.dim() != 2:
        raise refuse("x of (tokens, hidden)", tuple(x.shape))
    if weights.dim() != 2 or weights.shape[0] != x.shape[0]:
        raise refuse(f"weights of ({x.shape[0]}, k)", tuple(weights.shape))
    if down.dim() != 3 or down.shape[1] != x.shape[1]:
        raise refuse(f"down of (experts, {x.shape[1]}, ffn)", tuple(down.shape))
    if (offsets is None) != (order is None):
        raise refuse("offsets and order together, or neither", "None for one of them")
    (tokens, k), (experts, hidden, ffn) = weights.shape, down.shape
    wanted = {
        "weights": (weights, (tokens, k), torch.float32),
        "indices": (indices, (tokens, k), torch.int32),
        "gate_up": (gate_up, (experts, 2 * ffn, hidden), x.dtype),
        "down": (down, (experts, hidden, ffn), x.dtype),
        "offsets": (offsets, (experts,), torch.int32),
        "order": (order, (tokens * k,), torch.int32),
    }
    for name, (tensor, shape, dtype) in wanted.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise refuse(f"{name} of {shape}", tuple(tensor.shape))
        if tensor.dtype != dtype:
            raise refuse(f"{name} of {dtype}", tensor.dtype)
        if tensor.device != x.device:
            raise refuse(f"{name} on the device of x, {x.device}", tensor.device)
    return x.new_empty(x.shape)


_moe_ffn_op = library.define(
    "moe_ffn(Tensor x, Tensor weights, Tensor indices, Tensor gate_up, Tensor down, Tensor? offsets, Tensor? order) -> Tensor",
    _moe_ffn,
    _fake,
)
