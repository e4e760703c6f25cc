"""merge_state: attention over two sets of keys from attention over each, by their log-sum-exps.

Attention of a query over some keys leaves a state: out, the mean of values weighted by exp(score), and lse, the logarithm of
the sum of exp(score). Of the states a and b of the same queries over keys without a common one,

    lse = log(exp(a_lse) + exp(b_lse))        out = exp(a_lse - lse) a + exp(b_lse - lse) b

is the state over all keys (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Ye et al., FlashInfer:
Efficient and customizable attention engine for LLM inference serving, 2025).

a, b and out are (batch, seq, heads, head_dim) of one dtype; a_lse, b_lse and lse are fp32, (batch, heads, seq). Arithmetic is
fp32, and out is rounded once. A state with an lse of -inf has seen no key: its values are not used, and are NaN in every test.
Two of them give an out of 0 and an lse of -inf.
"""

from __future__ import annotations

import math

import torch

from minfer.ops import (
    DTYPES,
    GBPS,
    Case,
    Draw,
    Expected,
    Op,
    Spec,
    Tensors,
    compiled,
    floats,
    given,
    made_by,
    multiples,
    out,
    size,
    within,
)  # fmt: skip

U = 2.0**-24
Tensor = torch.Tensor


def empty_states(case: Case, remainders: tuple[int, ...]) -> Tensor:
    """Which of a state's queries have seen no key, (batch, heads, seq): some of every sixteen."""
    counts = [torch.arange(case[axis]) for axis in ("batch", "heads", "seq")]
    place = counts[0][:, None, None] + 3 * counts[1][:, None] + counts[2]
    return torch.isin(place % 16, torch.tensor(remainders))


def tensors(case: Case) -> list[Spec]:
    of_values = case["batch"], case["seq"], case["heads"], case["head_dim"]
    of_lse = case["batch"], case["heads"], case["seq"]
    found = [out("out", *of_values), out("lse", *of_lse, dtype="float32")]
    for name, remainders in (("a", (3, 9)), ("b", (5, 9))):
        empty = empty_states(case, remainders)

        def poison(made: Tensors, empty: Tensor = empty) -> Tensor:
            return empty.transpose(1, 2)[..., None].to(made["out"].device)

        def make_lse(made: Tensors, draw: Draw, device: torch.device, empty: Tensor = empty) -> Tensor:
            return draw.floats(of_lse, device).mul_(4).add_(5).masked_fill_(empty.to(device), -math.inf)

        found.append(given(name, *of_values, fill=floats(poison=poison)))
        found.append(given(f"{name}_lse", *of_lse, dtype="float32", fill=made_by(make_lse)))
    return found


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """A weight is 1 / (1 + e) or e / (1 + e) with e = exp(-|a_lse - b_lse|). The argument of exp is rounded twice, in the
    difference and when it is scaled for a power of 2. So a weight is off by a few u times 1 + |a_lse - b_lse|. lse is the
    larger one plus log(1 + e)."""
    lse = torch.logaddexp(t["a_lse"], t["b_lse"])
    value, magnitude = torch.zeros_like(t["a"]), torch.zeros_like(t["a"])
    for name in ("a", "b"):
        weight = (t[f"{name}_lse"] - lse).exp().nan_to_num(0.0).transpose(1, 2)[..., None]
        part = (weight * t[name]).masked_fill(weight == 0, 0.0)
        value, magnitude = value + part, magnitude + part.abs()
    distance = (t["a_lse"] - t["b_lse"]).abs().nan_to_num(0.0, 0.0, 0.0).transpose(1, 2)[..., None]
    largest = lse.abs().nan_to_num(0.0, 0.0, 0.0)
    return {"out": within(value, magnitude * (4 * distance + 16) * U), "lse": within(lse, (4 * largest + 16) * U)}


def traffic(case: Case) -> tuple[float, float]:
    rows = 1.0 * case["batch"] * case["seq"] * case["heads"]
    row = case["head_dim"] * DTYPES[case.dtype].itemsize + 4.0
    return 2 * rows * row, rows * row


def eager(out: Tensor, lse: Tensor, a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in PyTorch. -inf - -inf is NaN, and so may be the values of a state without keys."""
    merged = torch.logaddexp(a_lse, b_lse)
    parts = []
    for values, of_values in ((a, a_lse), (b, b_lse)):
        weight = (of_values - merged).exp().transpose(1, 2)[..., None]
        parts.append(torch.where(weight > 0, weight * values.float(), 0.0))
    return (parts[0] + parts[1]).to(a.dtype), merged


op = Op(
    "merge_state",
    axes={"batch": size(3), "seq": size(40), "heads": size(4), "head_dim": size(128)},
    tensors=tensors,
    reference=reference,
    flops=lambda case: 3.0 * case["batch"] * case["seq"] * case["heads"] * case["head_dim"],
    arithmetic=lambda case: ("fma", "float32"),
    traffic=traffic,
    metric=GBPS,
    strided=("out", "lse", "a", "a_lse", "b", "b_lse"),
    odd_shapes=(
        {"batch": 2, "seq": 37, "heads": 3, "head_dim": 64},
        {"batch": 1, "seq": 9, "heads": 2, "head_dim": 5},
    ),
    sizes={
        "small": [
            {"batch": 1, "seq": 1, "heads": 1, "head_dim": 1},
            {"batch": 33, "seq": 1, "heads": 5, "head_dim": 128},
            {"batch": 1, "seq": 21, "heads": 2, "head_dim": 96},
        ],
        "large": [
            {"batch": 1, "seq": 5000, "heads": 32, "head_dim": 128},
            {"batch": 300, "seq": 1, "heads": 64, "head_dim": 128},
        ],
    },
)

ALL = ("float32", "float16", "bfloat16")
op.torch("torch", eager, baseline=True, returns=(0, 1), dtypes=ALL)
op.torch("torch_compile", compiled(eager), returns=(0, 1), dtypes=ALL)
op.cuda("v01_naive.cu", dtypes=ALL)
op.cuda("v02_vectors.cu", dtypes=ALL, requires=multiples(head_dim=8))
op.cpp("cpu_rows.cpp", dtypes=ALL)
op.function(
    "merge_state",
    lambda minfer, out, lse, a, a_lse, b, b_lse: minfer.merge_state(a, a_lse, b, b_lse),
    returns=(0, 1),
    dtypes=ALL,
)
