"""seq_sum: each element becomes the sum of its sequence, over sequences of different lengths.

x and y are of one dtype; sums are fp32, and y is rounded once. `params.layout` says how sequences lie:

    padded  x and y are (batch, longest). seqlens is empty, or int32 (batch,): how many elements of each sequence count. y of
            the others is 0.
    packed  x and y are (tokens,), one sequence after the other without padding. seqlens is int32 (batch + 1,), cumulative
            from 0: `cu_seqlens`. y of the elements behind the last sequence is 0.

`params.lengths` draws the lengths; a sequence may have none. What lies behind them in x is not used: it is NaN in every test.
It is the smallest op that needs its sequences' lengths: it shows what padding costs, and what a kernel gains that was
compiled for a length.
"""

from __future__ import annotations

import torch

from minfer.ops import (
    DTYPES,
    GBPS,
    Case,
    Expected,
    Op,
    Ragged,
    Spec,
    Tensors,
    compiled,
    dot,
    fixed,
    floats,
    given,
    lengths,
    offsets,
    out,
    size,
)  # fmt: skip

TAIL = 16  # elements of poison behind packed sequences
Tensor = torch.Tensor


def is_packed(case: Case) -> bool:
    return case.params["layout"] == "packed"


def lengths_of(case: Case) -> list[int]:
    return lengths(case.params["lengths"], case["batch"], case["longest"])


def tensors(case: Case) -> list[Spec]:
    counts = lengths_of(case)
    if is_packed(case):
        shape: tuple[int, ...] = (sum(counts) + TAIL,)
        seqlens = offsets(counts)
        unused = torch.arange(shape[0]) >= sum(counts)
    else:
        shape = (case["batch"], case["longest"])
        seqlens = [] if case.params["lengths"] == "full" else counts
        unused = torch.arange(case["longest"]) >= torch.tensor(counts)[:, None]
    x = floats(poison=lambda made: unused.to(made["y"].device))
    return [
        out("y", *shape),
        given("x", *shape, fill=x),
        given("seqlens", len(seqlens), dtype="int32", fill=fixed(seqlens)),
    ]


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """A sum of n terms in fp32, in any order: see `dot`, whose products are exact here."""
    value, magnitude = torch.zeros_like(t["x"]), torch.zeros_like(t["x"])
    first = 0
    for sequence, count in enumerate(lengths_of(case)):
        of = slice(first, first + count) if is_packed(case) else (sequence, slice(count))
        value[of] = t["x"][of].sum()
        magnitude[of] = t["x"][of].abs().sum()
        first += count
    return {"y": dot(value, magnitude, case["longest"])}


def eager(y: Tensor, x: Tensor, seqlens: Tensor) -> Tensor:
    """PyTorch's own: a masked sum, or `segment_reduce` of packed sequences, and a gather."""
    if x.dim() == 2:
        return of_padded(x, seqlens)
    sums = torch.segment_reduce(x.float(), "sum", offsets=seqlens, unsafe=True)  # safe waits for the device
    place = torch.searchsorted(seqlens[1:], torch.arange(len(x), device=x.device), right=True)
    return torch.cat((sums, sums.new_zeros(1)))[place].to(x.dtype)


def of_padded(x: Tensor, seqlens: Tensor) -> Tensor:
    if not len(seqlens):
        return x.sum(1, keepdim=True, dtype=torch.float32).to(x.dtype).expand_as(x)
    used = torch.arange(x.shape[1], device=x.device) < seqlens[:, None]
    return torch.where(used, x.float(), 0.0).sum(1, keepdim=True).to(x.dtype) * used


def fused(y: Tensor, x: Tensor, seqlens: Tensor) -> Tensor:
    """The same of padded sequences, for torch.compile to fuse."""
    return of_padded(x, seqlens).contiguous()


def traffic(case: Case) -> tuple[float, float]:
    """Elements that count are read, and all of y is written."""
    y, _, seqlens = op.specs(case)
    return float(sum(lengths_of(case)) * DTYPES[case.dtype].itemsize + seqlens.nbytes), float(y.nbytes)


def shape(batch: int, longest: int) -> dict[str, int]:
    return {"batch": batch, "longest": longest}


op = Op(
    "seq_sum",
    axes={"batch": size(40), "longest": size(640)},
    params={"layout": ("padded", "packed"), "lengths": Ragged(examples=("full", "gaps:1"))},
    tensors=tensors,
    reference=reference,
    flops=lambda case: 1.0 * sum(lengths_of(case)),
    traffic=traffic,
    arithmetic=lambda case: ("fma", "float32"),
    metric=GBPS,
    strided=("y", "x"),
    odd_shapes=(shape(7, 77), shape(3, 1000)),
    sizes={
        "small": [shape(1, 1), shape(9, 9), shape(5, 136), shape(130, 33), shape(2, 2100)],
        "large": [shape(1000, 64), shape(257, 1023), shape(33, 8192), shape(2, 100_000)],
    },
)

DTYPES_SUMMED = ("float32", "bfloat16")

op.torch("torch", eager, baseline=True, returns=(0,), dtypes=DTYPES_SUMMED)
op.torch("torch_compile", compiled(fused), returns=(0,), dtypes=DTYPES_SUMMED, params={"layout": ("padded",)})
op.cuda("v01_naive.cu", dtypes=DTYPES_SUMMED)
op.cuda("v02_block.cu", dtypes=DTYPES_SUMMED)
op.triton("triton_sequences.py", dtypes=DTYPES_SUMMED)
op.cpp("cpu_naive.cpp", dtypes=DTYPES_SUMMED)
op.cpp("cpu_linear.cpp", dtypes=DTYPES_SUMMED)
