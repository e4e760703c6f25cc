"""sample_rows: `sample`, with a temperature, top_k, top_p and min_p for each row, as tensors.

So one launch serves requests with different settings. Each row follows the rule of `sample`; with a temperature of 0 its token
is the first of its largest logits. If a setting's tensor is empty, all rows have its default: temperature 1, top_k 0 (any),
top_p 1 (any) and min_p 0 (any). The host cannot check values on the device without waiting for it. So a value out of range has
a meaning. A temperature below 0, or NaN, is 0. A top_k below 0 is 0. top_p and min_p are clamped to [0, 1], and a top_p of 0
keeps only the likeliest tokens; if top_p or min_p is NaN, it is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from minfer.ops import GBPS, Case, Draw, Expected, Op, Spec, Tensors, given, made_by, out, size
from minfer.ops import sample as one_setting

Tensor = torch.Tensor


def drawn(
    count: int, least: float, most: float, special: float, dtype: torch.dtype = torch.float32
) -> Callable[[Tensors, Draw, torch.device], Tensor]:
    """For each of `count` rows a number from `least` to `most`; in a quarter of the rows `special` instead."""

    def make(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
        values, which = (torch.rand(count, generator=draw.generator, device=device) for _ in range(2))
        return torch.where(which < 0.25, special, least + (most - least) * values).to(dtype)

    return make


def tensors(case: Case) -> list[Spec]:
    rows = case["rows"]
    others = rows if case.params["settings"] == "all" else 0
    return [
        out("tokens", rows, dtype="int32"),
        given("logits", rows, case["vocab"]),
        given("u", rows, dtype="float32", fill=made_by(one_setting.uniforms)),
        given("temperature", rows, dtype="float32", fill=made_by(drawn(rows, 0.3, 1.5, 0.0))),
        given("top_k", others, dtype="int32", fill=made_by(drawn(others, 1, 60, 0, torch.int32))),
        given("top_p", others, dtype="float32", fill=made_by(drawn(others, 0.5, 1.0, 1.0))),
        given("min_p", others, dtype="float32", fill=made_by(drawn(others, 0.0, 0.1, 0.0))),
    ]


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """Nothing: only the check decides, as in `sample`."""
    return {}


def settings(t: Tensors) -> list[tuple[float, int, float, float]]:
    """The temperature, top_k, top_p and min_p of each row, as the scalars of `sample`."""
    found = []
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values = {name: t[name].tolist() or [value] * len(t["u"]) for name, value in defaults.items()}
    for temperature, top_k, top_p, min_p in zip(*values.values(), strict=True):
        found.append((temperature, top_k, top_p, min_p) if temperature > 0 else (1.0, 1, 1.0, 0.0))
    return found


def at_their_step(case: Case, t: Tensors) -> Tensor:
    """Whether each row's token is right, as in `sample`. With temperature 0 it must be the first of the largest logits."""
    vocab = case["vocab"]
    slack = (vocab**0.5 + 64) * one_setting.U + vocab * 2.0 ** (-31 if vocab <= 1 << 17 else -27)
    right = torch.zeros_like(t["u"], dtype=torch.bool)
    for row, of_row in enumerate(settings(t)):
        x, token, u = t["logits"][row].double(), int(t["tokens"][row]), t["u"][row].double()
        if not 0 <= token < vocab:
            continue
        if t["temperature"][row] == 0:
            right[row] = (x[token] == x.max()) & (x[:token] < x[token]).all()
            continue
        smallest, largest, mass = (found[0] for found in one_setting.kept(x[None], *of_row))
        least, most = (mass * smallest).cumsum(0), (mass * largest).cumsum(0)
        before, behind = (least - mass * smallest)[token] / most[-1], most[token] / least[-1]
        right[row] = largest[token] & (u >= before - slack) & (u <= behind + slack)
    return right


def eager(
    tokens: Tensor, logits: Tensor, u: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """What a PyTorch user writes: `sample.choose`, with one sort for all rows."""
    vocab = logits.shape[1]
    greedy = temperature == 0
    x = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    values, indices = x.sort(descending=True, stable=True)
    if len(top_k):
        k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long()
        limit = values.gather(1, k[:, None] - 1)
        values = values.masked_fill(values < limit, -math.inf)
    p = values.softmax(-1)
    if len(top_p):
        # Equal logits are all kept, so each of them has the sum before the first of them.
        before = (
            (p.cumsum(-1) - p).masked_fill(values.diff(dim=-1, prepend=values[:, :1] + 1) == 0, 0.0).cummax(-1).values
        )
        p = p.masked_fill(before >= top_p[:, None], 0.0)
    if len(min_p):
        p = p.masked_fill(p < min_p[:, None] * p[:, :1], 0.0)
    sums = torch.zeros_like(p).scatter(1, indices, p).cumsum(-1)
    found = torch.searchsorted(sums, u[:, None] * sums[:, -1:], right=True)[:, 0].clamp(max=vocab - 1)
    return torch.where(greedy, indices[:, 0], found)


op = Op(
    "sample_rows",
    axes={"rows": size(16), "vocab": size(4096)},
    params={"settings": ("all", "temperature")},
    tensors=tensors,
    reference=reference,
    checks={"tokens": at_their_step},
    metric=GBPS,
    strided=("logits",),
    odd_shapes=({"rows": 3, "vocab": 1001}, {"rows": 1, "vocab": 1}, {"rows": 2, "vocab": 40}),
    sizes={
        "small": [{"rows": 1, "vocab": 3000}, {"rows": 5, "vocab": 256}, {"rows": 2, "vocab": 2056}],
        "nan": [],
        "large": [{"rows": 1, "vocab": 128256}, {"rows": 64, "vocab": 128256}, {"rows": 300, "vocab": 32000}],
    },
)

DTYPES = ("float32", "bfloat16")

op.torch("torch", eager, baseline=True, returns=(0,), dtypes=DTYPES)
op.cuda("v01_naive.cu", dtypes=DTYPES)
op.cuda("v02_cluster.cu", dtypes=DTYPES, archs="sm_90a")
op.cpp("cpu_naive.cpp", dtypes=DTYPES)
