"""moe_ffn: the feed-forward layer of a mixture of experts with SwiGLU (Shazeer et al., Outrageously large neural networks, ICLR
2017; Jiang et al., Mixtral of experts, 2024): out[token] = sum over its k slots of w (silu(x Wg) * (x Wu)) Wd, with the
weights Wg, Wu and Wd of the slot's expert.

x and out are (tokens, hidden), of one half type. Sums are fp32. Routing is what `moe_route` hands over:

- weights (tokens, k), float32, and indices (tokens, k), int32: a slot's factor and its expert. An index outside of 0 to
  experts - 1 is of an expert elsewhere: the slot adds nothing, its weight is not used, and a token without slots gets zeros.
- offsets (experts,), int32: where each expert's part of `order` ends. order (tokens * k,), int32: the slots, token * k + rank,
  sorted by expert. What lies behind the last offset is not used.
- gate_up (experts, 2 * ffn, hidden): the rows of Wg and then those of Wu, each as `nn.Linear` keeps it. down (experts, hidden,
  ffn): Wd likewise.

`params.routing` says how tokens are spread; counts are a function of the case, and which expert has which is of the seed:

    uniform    k different experts, each as likely as another
    zipf       the r-th expert 1 / r as likely as the first
    one        every slot to one expert
    empty      every second expert has no token, where k leaves that possible
    elsewhere  uniform, but a third of the slots and every eighth token are of experts elsewhere

Experts without tokens have weights of NaN, tokens without slots have an x of NaN, and slots elsewhere a weight of NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from minfer.ops import (
    DTYPES,
    TFLOPS,
    Case,
    Draw,
    Expected,
    Op,
    Spec,
    Tensors,
    at_most,
    both,
    floats,
    given,
    made_by,
    multiples,
    out,
    size,
    up_to,
    within,
)  # fmt: skip
from minfer.ops.moe_ffn import baselines
from minfer.ops.tensors import ABSURD

Tensor = torch.Tensor
U = 2.0**-24
ROUTINGS = ("uniform", "zipf", "one", "empty", "elsewhere")
SEED = 19  # of the chance in a case's routing


@lru_cache(maxsize=64)
def experts_of(routing: str, tokens: int, experts: int, k: int) -> Tensor:
    """The expert of each slot, (tokens, k), int64, before experts are renamed; -1 elsewhere."""
    if routing == "one":
        return torch.full((tokens, k), experts // 2)
    likely = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(SEED)).log()  # Gumbel's top-k
    if routing == "zipf":
        likely *= torch.arange(1, experts + 1)  # the smallest of exponential times with rates 1 / r
    if routing == "empty":
        likely[:, 1::2] -= 1e6
    found = likely.topk(k).indices
    if routing == "elsewhere":
        slot = torch.arange(tokens * k).view(tokens, k)
        found[(slot % 3 == 1) | (slot // k % 8 == 7)] = -1
    return found


def experts_of_case(case: Case) -> Tensor:
    return experts_of(case.params["routing"], case["tokens"], case["experts"], case["k"])


def slots_here(case: Case) -> int:
    """How many slots have an expert."""
    return int((experts_of_case(case) >= 0).sum())


def tensors(case: Case) -> list[Spec]:
    tokens, experts, k, hidden, ffn = (case[axis] for axis in ("tokens", "experts", "k", "hidden", "ffn"))
    elsewhere = experts_of_case(case) < 0
    is_some = bool(elsewhere.any())

    def indices(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
        names = torch.tensor(draw.random.sample(range(experts), experts))
        named = names[experts_of_case(case).clamp_min(0)]
        absurd = torch.where(torch.arange(k) % 2 == 0, -1, ABSURD["int32"])
        return torch.where(elsewhere, absurd, named).to(device)

    def offsets(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
        return counts(made["indices"], experts).cumsum(0)

    def order(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
        slots = sorted_slots(made["indices"], experts)
        slots[int(made["offsets"][-1]) :] = ABSURD["int32"]
        return slots

    def no_tokens(made: Tensors) -> Tensor:
        return (counts(made["indices"], experts) == 0)[:, None, None]

    return [
        out("out", tokens, hidden),
        given("x", tokens, hidden, fill=floats(poison=_mask(elsewhere.all(1, keepdim=True)) if is_some else None)),
        given("weights", tokens, k, dtype="float32", fill=floats(poison=_mask(elsewhere) if is_some else None)),
        given("indices", tokens, k, dtype="int32", fill=made_by(indices)),
        given("offsets", experts, dtype="int32", fill=made_by(offsets)),
        given("order", tokens * k, dtype="int32", fill=made_by(order)),
        given("gate_up", experts, 2 * ffn, hidden, fill=floats(hidden**-0.5, poison=no_tokens)),
        given("down", experts, hidden, ffn, fill=floats(ffn**-0.5, poison=no_tokens)),
    ]


def _mask(mask: Tensor) -> Callable[[Tensors], Tensor]:
    return lambda made: mask.to(made["out"].device)


def counts(indices: Tensor, experts: int) -> Tensor:
    """How many slots each expert has, (experts,), int64."""
    flat = indices.flatten().long()
    here = (flat >= 0) & (flat < experts)
    return torch.zeros(experts + 1, dtype=torch.int64, device=flat.device).index_add_(
        0, torch.where(here, flat, experts), torch.ones_like(flat)
    )[:experts]


def sorted_slots(indices: Tensor, experts: int) -> Tensor:
    """The slots sorted by expert, those elsewhere last, (tokens * k,), int64."""
    flat = indices.flatten().long()
    return torch.where((flat >= 0) & (flat < experts), flat, experts).sort(stable=True).indices


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """In fp64, an expert at a time. What may differ, with u the unit roundoff of fp32 and h that of the tensors' dtype:

    x Wg and x Wu are dot products, which PyTorch rounds to the dtype: errors eg and eu. SwiGLU's error is that of
    `gated_unit`, and its result is rounded once more: eh. These errors are independent of each other, so that the product with
    Wd is off by 6 standard deviations, 6 sqrt(sum (eh Wd)^2), and by its own sum's bound. What a slot adds is rounded to the
    dtype before it is weighted, after it, and PyTorch rounds the weight: 3 h each."""
    unit, dim, ffn = torch.finfo(DTYPES[case.dtype]).eps / 2, case["hidden"], case["ffn"]
    subnormal = 2.0**-25 if case.dtype == "float16" else 0.0
    value, bound = torch.zeros_like(t["x"]), torch.zeros_like(t["x"])
    for expert in range(case["experts"]):
        token, rank = (t["indices"] == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        x, down = t["x"][token], t["down"][expert].t()

        def half(w: Tensor, x: Tensor = x) -> tuple[Tensor, Tensor]:
            product = x @ w.t()
            return product, (x.abs() @ w.t().abs()).mul_(4 * dim**0.5 * U).add_(product.abs(), alpha=2 * unit)

        (g, eg), (up, eu) = half(t["gate_up"][expert, :ffn]), half(t["gate_up"][expert, ffn:])
        gate = g.sigmoid().mul_(g)
        eh = eg.mul_(1.1).add_(gate.abs() * (unit + 8 * U * (1 + g.abs()))).mul_(up.abs() + eu).add_(gate.abs() * eu)
        h = gate.mul_(up)
        eh.add_(h.abs(), alpha=unit).add_(subnormal)
        y, ey = h @ down, (eh.square_() @ down.square()).sqrt_().mul_(6)
        ey.add_(h.abs_() @ down.abs(), alpha=4 * ffn**0.5 * U).add_(y.abs(), alpha=3 * unit).add_(3 * subnormal)
        w = t["weights"][token, rank][:, None]
        value.index_add_(0, token, w * y)
        bound.index_add_(0, token, w.abs() * ey)
    return {"out": within(value, bound)}


def traffic(case: Case) -> tuple[float, float]:
    """Tokens that have a slot, the weights of experts that have one, and the routing; all of out. What lies between the two
    products need not leave the chip."""
    chosen, item = experts_of_case(case), DTYPES[case.dtype].itemsize
    used, tokens = len(chosen[chosen >= 0].unique()), int((chosen >= 0).any(1).sum())
    routing = 4.0 * (3 * chosen.numel() + case["experts"])
    read = item * (tokens * case["hidden"] + 3.0 * used * case["hidden"] * case["ffn"]) + routing
    return read, 1.0 * item * case["tokens"] * case["hidden"]


def shape(tokens: int, experts: int, k: int, hidden: int, ffn: int) -> dict[str, int]:
    return {"tokens": tokens, "experts": experts, "k": k, "hidden": hidden, "ffn": ffn}


op = Op(
    "moe_ffn",
    axes={"tokens": size(48), "experts": size(12), "k": up_to("experts"), "hidden": size(96), "ffn": size(96)},
    params={"routing": ROUTINGS},
    tensors=tensors,
    reference=reference,
    flops=lambda case: 6.0 * slots_here(case) * case["hidden"] * case["ffn"],
    traffic=traffic,
    arithmetic=lambda case: (case.dtype, "float32"),
    metric=TFLOPS,
    strided=("out", "x"),
    odd_shapes=(shape(7, 5, 2, 33, 17), shape(21, 6, 3, 40, 24)),
    sizes={
        "small": [shape(20, 3, 1, 32, 40)],
        "nan": [shape(9, 4, 2, 64, 32)],
        "large": [
            shape(1, 8, 2, 4096, 1024),
            shape(16, 128, 8, 2048, 768),
            shape(1000, 128, 8, 256, 384),
            shape(700, 8, 2, 1032, 1160),
            shape(4096, 128, 8, 2048, 768),
        ],
    },
)

VECTORS = multiples(hidden=8, ffn=8)  # rows of 16-byte pieces
TABLE = both(VECTORS, at_most(experts=512))  # whose tiles are counted in shared memory


def few_rows(case: Case) -> str | None:
    """The rule that an expert have at most 16 tokens on average: each further 16 read its weights again."""
    mean = case["tokens"] * case["k"] / case["experts"]
    return f"takes at most 16 tokens an expert on average, got {mean:.4g}" if mean > 16 else None


baselines.register(op, ROUTINGS)
op.cuda("v01_naive.cu")
op.cuda("v02_mma.cu", requires=TABLE)
op.cuda("v03_wgmma.cu", archs="sm_90a", requires=TABLE)
op.cuda("v04_few_rows.cu", requires=both(VECTORS, few_rows))
op.cuda("v05_pairs.cu", archs="sm_90a", requires=TABLE)
op.triton("triton_grouped.py")
op.cpp("cpu_naive.cpp")
op.function(
    "moe_ffn",
    lambda minfer, out, x, weights, indices, offsets, order, gate_up, down: minfer.moe_ffn(
        x, weights, indices, gate_up, down, offsets=offsets, order=order
    ),
    returns=(0,),
)
op.draws("experts", without={"torch_eager": "launches several kernels for each expert"})
