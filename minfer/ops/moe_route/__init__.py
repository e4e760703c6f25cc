"""moe_route: the router of a mixture of experts, from logits to the order in which a grouped product takes the tokens
(Shazeer et al., Outrageously large neural networks, ICLR 2017; the weights as in Jiang et al., Mixtral of experts, 2024).

logits are (tokens, experts), float32 or bfloat16. Of each token the k largest are taken, largest first:

- weights (tokens, k), float32: their softmax over all experts; with `normalize`, divided by its sum over the k.
- indices (tokens, k), int32: their experts.
- counts (experts,), int32: how many tokens chose each expert.
- offsets (experts,), int32: where each expert's part of `order` ends: the running sum of counts, as torch's grouped
  matrix product takes it.
- order (tokens * k,), int32: the slots, token * k + rank, sorted by expert, and by token within an expert.
"""

from __future__ import annotations

import torch

from minfer.ops import (
    GBPS,
    Case,
    Expected,
    Op,
    Spec,
    Tensors,
    at_most,
    compiled,
    given,
    out,
    size,
    up_to,
    within,
)  # fmt: skip

U = 2.0**-24


def tensors(case: Case) -> list[Spec]:
    tokens, experts, k = case["tokens"], case["experts"], case["k"]
    return [
        out("weights", tokens, k, dtype="float32"),
        out("indices", tokens, k, dtype="int32"),
        out("counts", experts, dtype="int32"),
        out("offsets", experts, dtype="int32"),
        out("order", tokens * k, dtype="int32"),
        given("logits", tokens, experts),
    ]


def slack(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """How large the relative error of a probability in fp32 may be: the exponent's rounding is relative to its size, the
    distance of a logit from the row's largest; the sum has `experts` positive terms; eight more roundings are for the
    exponential, two quotients and the sum over the k."""
    return ((logits.amax(1, keepdim=True) - values) + 4 * logits.shape[1] ** 0.5 + 8) * U


def reference(case: Case, t: Tensors, normalize: bool) -> dict[str, Expected]:
    """The weights: the k largest values of the softmax, which are determined where the indices are not."""
    logits = t["logits"]
    values = logits.topk(case["k"]).values
    weights = (values - logits.logsumexp(1, keepdim=True)).exp()
    if normalize:
        weights = values.softmax(1)
    return {"weights": within(weights, weights * slack(logits, values))}


def lead_to_the_largest(case: Case, t: Tensors) -> torch.Tensor:
    """Each index is of an expert whose logit is the one of its rank, and comes once in its row. Logits whose
    probabilities in fp32 may be equal count as equal, because PyTorch's users sort the probabilities."""
    indices, logits = t["indices"].long(), t["logits"].double()
    safe = indices.clamp(0, case["experts"] - 1)
    values = logits.topk(case["k"]).values
    near = (logits.gather(1, safe) - values).abs() <= 2 * slack(logits, values)
    ones = torch.ones_like(safe, dtype=torch.int32)
    times = torch.zeros_like(logits, dtype=torch.int32).scatter_add_(1, safe, ones)
    return (indices == safe) & near & (times.gather(1, safe) == 1)


def _counts(case: Case, t: Tensors) -> torch.Tensor:
    flat = t["indices"].long().clamp(0, case["experts"] - 1).flatten()
    return torch.zeros_like(t["counts"]).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))


CHECKS = {  # what a kernel gives must agree with its own indices
    "indices": lead_to_the_largest,
    "counts": lambda case, t: t["counts"] == _counts(case, t),
    "offsets": lambda case, t: t["offsets"] == _counts(case, t).cumsum(0),
    "order": lambda case, t: t["order"] == t["indices"].flatten().sort(stable=True).indices,
}


def route(logits: torch.Tensor, k: int, normalize: bool) -> tuple[torch.Tensor, ...]:
    """What a PyTorch user writes."""
    weights, indices = logits.softmax(-1, dtype=torch.float32).topk(k)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    flat = indices.flatten()
    counts = torch.zeros(logits.shape[1], dtype=torch.int32, device=logits.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    order = flat.sort(stable=True).indices
    return weights, indices.int(), counts, counts.cumsum(0, dtype=torch.int32), order.int()


def eager(
    weights: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    order: torch.Tensor,
    logits: torch.Tensor,
    normalize: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Softmax, topk, scatter_add, cumsum and a stable sort, each a kernel of its own or several."""
    return route(logits, weights.shape[1], normalize)


def fused(
    weights: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    order: torch.Tensor,
    logits: torch.Tensor,
    normalize: bool = True,
) -> None:
    """The same, for torch.compile to fuse."""
    made = route(logits, weights.shape[1], normalize)
    for tensor, result in zip((weights, indices, counts, offsets, order), made, strict=True):
        tensor.copy_(result)


def sorts_fast(case: Case) -> str | None:
    """The rule that inductor makes no sort of its own which it compiles for minutes."""
    slots = case["tokens"] * case["k"]
    return f"takes minutes to compile a sort of 33 to 512 slots, got {slots}" if 32 < slots <= 512 else None


op = Op(
    "moe_route",
    axes={"tokens": size(), "experts": size(256), "k": up_to("experts")},
    tensors=tensors,
    reference=reference,
    checks=CHECKS,
    calls={"normalized": {"normalize": True}, "plain": {"normalize": False}},
    metric=GBPS,
    strided=("logits",),
    odd_shapes=(
        {"tokens": 3, "experts": 8, "k": 2},
        {"tokens": 77, "experts": 100, "k": 7},
        {"tokens": 1, "experts": 1, "k": 1},
        {"tokens": 260, "experts": 130, "k": 3},
    ),
    sizes={
        "small": [
            {"tokens": 1, "experts": 8, "k": 2},
            {"tokens": 16, "experts": 128, "k": 8},
            {"tokens": 33, "experts": 64, "k": 6},
            {"tokens": 200, "experts": 256, "k": 8},
            {"tokens": 9, "experts": 40, "k": 32},
        ],
        "nan": [{"tokens": 6, "experts": 16, "k": 2}, {"tokens": 64, "experts": 128, "k": 8}],
        "large": [
            {"tokens": 128, "experts": 128, "k": 8},
            {"tokens": 4096, "experts": 128, "k": 8},
            {"tokens": 4097, "experts": 8, "k": 2},
            {"tokens": 40000, "experts": 60, "k": 4},
        ],
    },
)

DTYPES = ("float32", "bfloat16")
MOST = at_most(experts=256, k=32)  # eight logits for each lane of a warp, and a lane for each that is taken

op.torch("torch", eager, baseline=True, returns=(0, 1, 2, 3, 4), dtypes=DTYPES)
op.torch("torch_compile", compiled(fused), dtypes=DTYPES, requires=sorts_fast)
op.cuda("v01_naive.cu", dtypes=DTYPES)
op.cuda("v02_one_launch.cu", dtypes=DTYPES, requires=MOST)
op.triton("triton_two_launches.py", dtypes=DTYPES, requires=MOST)
op.cpp("cpu_naive.cpp", dtypes=DTYPES)
