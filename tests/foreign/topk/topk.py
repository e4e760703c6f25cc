"""top-k: the k largest of each row, in falling order, and where they are; among equal values any may be taken, each once."""

from __future__ import annotations

import torch

from minfer.ops import GBPS, Case, Expected, Op, Spec, Tensors, exact, given, integers, out, size, up_to


def tensors(case: Case) -> list[Spec]:
    rows, k = case["rows"], case["k"]
    return [
        out("values", rows, k),
        out("indices", rows, k, dtype="int32"),
        given("x", rows, case["n"], fill=integers(-64, 65)),  # whole numbers, so that there are ties
    ]


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    return {"values": exact(t["x"].topk(case["k"]).values)}


def lead_to_their_values(case: Case, t: Tensors) -> torch.Tensor:
    """Each index is within its row, points at its value, and comes once."""
    indices, x = t["indices"].long(), t["x"]
    safe = indices.clamp(0, case["n"] - 1)
    times = torch.zeros_like(x, dtype=torch.int32).scatter_add_(1, safe, torch.ones_like(safe, dtype=torch.int32))
    return (indices == safe) & (x.gather(1, safe) == t["values"]) & (times.gather(1, safe) == 1)


def eager(values: torch.Tensor, indices: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's own, whose indices are int64."""
    found = x.topk(values.shape[1])
    return found.values, found.indices


op = Op(
    "foreign_topk",
    axes={"rows": size(64), "n": size(1024), "k": up_to("n")},
    tensors=tensors,
    reference=reference,
    checks={"indices": lead_to_their_values},
    metric=GBPS,
    odd_shapes=({"rows": 3, "n": 77, "k": 5}, {"rows": 1, "n": 1, "k": 1}),
    sizes={"small": [{"rows": 2, "n": 40, "k": 40}]},
)

ALL = ("float32", "float16", "bfloat16")
op.torch("torch", eager, baseline=True, returns=(0, 1), dtypes=ALL)
op.cpp("passes.cpp", dtypes=ALL)
op.cuda("blocks.cu", dtypes=ALL)
