"""sample: one token of each row of logits, drawn after temperature, top-k, top-p and min-p, from a given random number.

logits are (rows, vocab), float32 or bfloat16; u is (rows,), float32, uniform on [0, 1); tokens (rows,), int32. With
p = softmax(logits / temperature), a token is kept if

- its logit is at least the top_k-th largest of the row (top_k = 0: any), so that ties are kept together;
- the tokens with larger logits have less than top_p of the mass of what top_k keeps (Holtzman et al., The curious case of
  neural text degeneration, ICLR 2020);
- p is at least min_p times the largest of the row (Nguyen et al., Turning up the heat: min-p sampling, ICLR 2025).

The token is the first, in the order of the vocabulary, at which the running sum of the kept p exceeds u times their sum:
the inverse of the distribution function at u. So u determines the token, up to rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from minfer.ops import GBPS, Case, Draw, Expected, Op, Spec, Tensors, at_most, compiled, given, made_by, out, size

U = 2.0**-24


def uniforms(made: Tensors, draw: Draw, device: torch.device) -> torch.Tensor:
    return torch.rand(made["logits"].shape[0], generator=draw.generator, device=device)


def tensors(case: Case) -> list[Spec]:
    rows = case["rows"]
    return [
        out("tokens", rows, dtype="int32"),
        given("logits", rows, case["vocab"]),
        given("u", rows, dtype="float32", fill=made_by(uniforms)),
    ]


def reference(case: Case, t: Tensors, **call: Any) -> dict[str, Expected]:
    """Nothing but the check: near a step of the distribution function two tokens are right."""
    return {}


def at_threshold(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, near: torch.Tensor) -> Any:
    """The smallest and the largest set that a threshold may keep which rounding puts between `low` and `high`. Of values
    nearer than `near`, which rounding makes ties, any part may be kept; a lone value at the threshold is."""
    lone = ((x - high).abs() <= near).sum(1, keepdim=True) == 1
    return torch.where(lone, x >= high - near, x > high + near), x >= low - near


def kept(x: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
    """The smallest and the largest set that may be kept of each row of fp64 logits."""
    most = x.amax(1, keepdim=True)
    near = 2.0**-21 * (most.abs() + x.abs().amax(1, keepdim=True) + temperature)
    mass = ((x - most) / temperature).exp()
    smallest = largest = torch.ones_like(x, dtype=torch.bool)
    if 0 < top_k < x.shape[1]:
        limit = x.topk(top_k).values[:, -1:]
        smallest, largest = at_threshold(x, limit, limit, near)
    if top_p < 1:
        order = x.sort(descending=True)
        sums = (mass * largest).gather(1, order.indices).cumsum(1)
        slack = 2.0**-16  # of the sums, and of what ties at top_k add to them
        ties = ((mass * largest).sum(1, keepdim=True) - (mass * smallest).sum(1, keepdim=True)) / sums[:, -1:]
        ends = []
        for part in (top_p * (1 + slack), top_p * (1 - slack - ties)):
            at = (sums < part * sums[:, -1:]).sum(1, keepdim=True).clamp(max=x.shape[1] - 1)
            ends.append(order.values.gather(1, at))
        less, more = at_threshold(x, ends[0], ends[1], near)
        smallest, largest = smallest & less, largest & more
    if min_p > 0:
        limit = most + temperature * math.log(min_p)
        smallest, largest = smallest & (x > limit + near), largest & (x >= limit - near)
    return smallest, largest, mass


def at_their_step(case: Case, t: Tensors) -> torch.Tensor:
    """A token may be kept, and u is where the distribution function passes it, from the least that it may be before the
    token to the most behind it. In fp32 the sums of `vocab` terms have an error of about sqrt(vocab) u in all; our kernels
    round each mass to a multiple of 2^-30 of the largest (`cuda/sample_row.cuh`), or 2^-26 where a vocabulary is large."""
    x, u, vocab = t["logits"].double(), t["u"].double()[:, None], case["vocab"]
    smallest, largest, mass = kept(x, **op.call(case))
    least, most = (mass * smallest).cumsum(1), (mass * largest).cumsum(1)
    tokens = t["tokens"].long()[:, None]
    safe = tokens.clamp(0, vocab - 1)
    before = (least - mass * smallest).gather(1, safe) / most[:, -1:]
    behind = most.gather(1, safe) / least[:, -1:]  # infinite where nothing is certain to be kept
    slack = (vocab**0.5 + 64) * U + vocab * 2.0 ** (-31 if vocab <= 1 << 17 else -27)
    right = (tokens == safe) & largest.gather(1, safe) & (u >= before - slack) & (u <= behind + slack)
    return right[:, 0]


def choose(
    logits: torch.Tensor, u: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """What a PyTorch user writes, with the inverse of the distribution function in the place of `multinomial`."""
    x = logits.float() / temperature
    if 0 < top_k < x.shape[1]:
        x = x.masked_fill(x < x.topk(top_k).values[:, -1:], -math.inf)
    if top_p < 1:
        values, indices = x.sort(descending=True)
        p = values.softmax(-1)
        x = x.masked_fill(
            torch.zeros_like(x, dtype=torch.bool).scatter(1, indices, p.cumsum(-1) - p >= top_p), -math.inf
        )
    p = x.softmax(-1)
    if min_p > 0:
        p = p.masked_fill(p < min_p * p.amax(-1, keepdim=True), 0.0)
    sums = p.cumsum(-1)
    return torch.searchsorted(sums, u[:, None] * sums[:, -1:], right=True)[:, 0].clamp(max=x.shape[1] - 1)


def eager(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    u: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """By sorting."""
    return choose(logits, u, temperature, top_k, top_p, min_p)


op = Op(
    "sample",
    axes={"rows": size(16), "vocab": size(4096)},
    tensors=tensors,
    reference=reference,
    checks={"tokens": at_their_step},
    calls={
        "nucleus": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.0},
        "plain": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        "top_p": {"temperature": 0.3, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
        "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    },
    metric=GBPS,
    strided=("logits",),
    odd_shapes=({"rows": 3, "vocab": 1001}, {"rows": 1, "vocab": 1}, {"rows": 2, "vocab": 40}),
    sizes={
        "small": [{"rows": 1, "vocab": 3000}, {"rows": 5, "vocab": 256}, {"rows": 2, "vocab": 2056}],
        "nan": [],
        "large": [
            {"rows": 1, "vocab": 128256},
            {"rows": 64, "vocab": 128256},
            {"rows": 7, "vocab": 50257},
            {"rows": 300, "vocab": 32000},
        ],
    },
)

DTYPES = ("float32", "bfloat16")

op.torch("torch", eager, baseline=True, returns=(0,), dtypes=DTYPES)
# Of several rows PyTorch 2.11 has "TypeError: list indices must be integers or slices, not NoneType".
op.torch("torch_compile", compiled(eager), returns=(0,), dtypes=DTYPES, requires=at_most(rows=1))
op.cuda("v01_naive.cu", dtypes=DTYPES)
op.cuda("v02_split.cu", dtypes=DTYPES)
op.cuda("v03_cluster.cu", dtypes=DTYPES, archs="sm_90a")
op.cuda("v04_seeded.cu", dtypes=DTYPES, archs="sm_90a", entries=("draw",))
op.cpp("cpu_naive.cpp", dtypes=DTYPES)
