"""ilp: y = x, (n,), fp32, with 1 to 16 elements a thread, and with fewer and fewer blocks on a multiprocessor.

A thread asks for all its elements before it waits for the first: instruction-level parallelism. The call says how many
of the blocks that fit a multiprocessor may be there at once: `full`, or a `half`, a `quarter`, an `eighth` of them.
"""

from __future__ import annotations

import torch

from minfer.ops import GBPS, Case, Expected, Op, Spec, Tensors, exact, given, out, size

ELEMENTS = {"v01_one": 1, "v02_two": 2, "v03_four": 4, "v04_eight": 8, "v05_sixteen": 16}
SHARES = {"full": 1, "half": 2, "quarter": 4, "eighth": 8}


def tensors(case: Case) -> list[Spec]:
    return [out("y", case["n"]), given("x", case["n"])]


def reference(case: Case, t: Tensors, share: int) -> dict[str, Expected]:
    return {"y": exact(t["x"])}


def copy(y: torch.Tensor, x: torch.Tensor, share: int = 1) -> None:
    """PyTorch's own copy, which has all of the GPU under every call."""
    y.copy_(x)


op = Op(
    "ilp",
    axes={"n": size(20_000)},
    tensors=tensors,
    reference=reference,
    calls={name: {"share": share} for name, share in SHARES.items()},
    metric=GBPS,
    odd_shapes=({"n": 1}, {"n": 5000}),
    sizes={
        "small": [{"n": 33}, {"n": 256}, {"n": 4096}, {"n": 4097}, {"n": 9000}],
        "nan": [],
        "large": [{"n": 1 << 20}, {"n": 100_003}],
    },
)

FP32 = ("float32",)

op.torch("torch", copy, baseline=True, dtypes=FP32)
for rung in ELEMENTS:
    op.cuda("copies.cu", name=rung, dtypes=FP32)
op.cpp("cpu_copy.cpp", dtypes=FP32)
