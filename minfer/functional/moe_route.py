"""`moe_route`: the router of a mixture of experts as one function of PyTorch, `torch.ops.minfer.moe_route`."""

from __future__ import annotations

import torch

from minfer.functional import library
from minfer.functional.contract import Contract

TAKES = Contract(
    "moe_route",
    """
    logits: float32 | bfloat16 (tokens, experts)
    -> float32 (tokens, k)
    -> int32 (tokens, k)
    -> int32 (experts)
    -> int32 (experts)
    -> int32 (tokens*k)
    """,
    experts=1,
)
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@library.public
def moe_route(logits: torch.Tensor, k: int, normalize: bool = True) -> Routed:
    """Choose k experts for each token: `(weights, indices, counts, offsets, order)` of logits (tokens, experts), float32 or
    bfloat16.

    weights (tokens, k), float32: the k largest of the softmax over the experts, largest first; with `normalize`, divided by
    their sum. indices (tokens, k), int32: their experts; of equal logits any may be chosen. counts (experts,), int32: how
    many tokens each expert has. offsets (experts,), int32: the running sum of counts, as torch's grouped matrix product takes
    it. order (tokens * k,), int32: the slots token * k + rank, sorted by expert and then by token, so that the tokens of an
    expert are adjacent in `x[order // k]`.

    Works under `torch.compile`. It has no backward: raises RuntimeError where one would be recorded. Raises ValueError for
    arguments that do not fit."""
    library.refuse_gradients("moe_route", logits)
    found: Routed = _moe_route_op(logits, k, normalize)
    return found


def _route(logits: torch.Tensor, k: int, normalize: bool) -> Routed:
    made = _fake(logits, k, normalize)
    if logits.shape[0] == 0:
        made[2].zero_(), made[3].zero_()
        return made
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    shape = {"tokens": logits.shape[0], "experts": logits.shape[1], "k": k}
    library.call("moe_route", (*made, logits), logits.dtype, shape, normalize=normalize)
    return made


def _fake(logits: torch.Tensor, k: int, normalize: bool) -> Routed:
    experts = TAKES.check(logits)["experts"]
    if not 1 <= k <= experts:
        raise TAKES.error(f"k from 1 to the {experts} experts", k)
    made: Routed = TAKES.make(logits, k=k)
    return made


_moe_route_op = library.define(
    "moe_route(Tensor logits, int k, bool normalize) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _route, _fake
)
