"""softmax: y = exp(z - max z) / sum exp(z - max z) over the rows of z, which is x under a mask.

x and y are (rows, n), row-major, of one dtype; sums are fp32, and y is rounded once. The parameter `mask` says what z is:

    none      x
    additive  x + mask, with a mask (n,) of x's dtype for all rows: a padding mask or a bias; -inf leaves an element out
    length    the first mask[row] elements of a row, int32, at least 1: the others are never used, and their y is 0

The lengths of a case are those of causal attention whose last query sees all keys: n - q + 1 to n, again and again, for
q = min(rows, n) queries. A row of which nothing is left, all -inf or of length 0, gives NaN, as PyTorch's.
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
    at_most,
    both,
    compiled,
    fixed,
    floats,
    given,
    made_by,
    multiples,
    out,
    size,
    within,
)  # fmt: skip
from minfer.ops.bounds import ROUNDOFF


def lengths(case: Case) -> list[int]:
    """How many elements of each row count under a causal mask."""
    queries = min(case["rows"], case["n"])
    return [case["n"] - queries + 1 + row % queries for row in range(case["rows"])]


def bias(made: Tensors, draw: Draw, device: torch.device) -> torch.Tensor:
    """Random, and -inf at every seventh element from the fourth on, so that none is all -inf."""
    values = draw.floats(made["x"].shape[1:], device)
    values[3::7] = -math.inf
    return values


def unused(made: Tensors) -> torch.Tensor:
    """Which elements of x lie behind the lengths of their rows."""
    rows, n = made["y"].shape
    queries, row = min(rows, n), torch.arange(rows, device=made["y"].device)
    return torch.arange(n, device=row.device) >= (n - queries + 1 + row % queries)[:, None]


def tensors(case: Case) -> list[Spec]:
    rows, n, kind = case["rows"], case["n"], case.params["mask"]
    mask = {
        "none": given("mask", 0),
        "additive": given("mask", n, fill=made_by(bias)),
        "length": given("mask", rows, dtype="int32", fill=fixed(lengths(case))),
    }
    x = floats(4.0, poison=unused if kind == "length" else None)  # some rows with one large element, as attention's
    return [out("y", rows, n), given("x", rows, n, fill=x), mask[kind]]


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """z: x itself, or with -inf where an element is left out; an additive mask is added in the wider of fp32 and x."""
    if mask.dtype == torch.int32:
        return x.masked_fill(torch.arange(x.shape[1], device=x.device) >= mask[:, None], -math.inf)
    if not mask.numel():
        return x
    return x + (mask if x.dtype == torch.float64 else mask.float())


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """An exponent z - max z takes two roundings in fp32, one for the difference d and one for the factor log2 e, and an
    additive mask one of z before: an error of 2 u d + u max |z|, which is the relative error of the power, with two ulps for
    the function itself. In the sum, exponentials weigh their own errors: sum p d <= log n, by the entropy of p. The sum of n
    positive terms has at most 4 sqrt(n) u, if its roundings are independent. Terms of a few u break this: a sum in order drops
    each term below u times the sum so far, always downwards. So a term up to 4 u counts with its whole value, at most u. Eight
    more roundings are for the quotient."""
    z = masked(t["x"], t["mask"])
    value = torch.softmax(z, 1)
    finite = z.masked_fill(z.isinf(), 0.0)
    largest = finite.abs().amax(1, keepdim=True) if case.params["mask"] == "additive" else 0.0
    distance = z.amax(1, keepdim=True) - finite
    n, unit = case["n"], ROUNDOFF["float32"]
    dropped = value.masked_fill(value > 4 * unit, 0.0).clamp_(max=unit).sum(1, keepdim=True)
    roundings = 2 * distance + 2 * math.log(n) + 2 * largest + 4 * math.sqrt(n) + 16
    return {"y": within(value, value * (roundings * unit + dropped))}


def traffic(case: Case) -> tuple[float, float]:
    """Elements behind a row's length need not be read."""
    item, rows, n = DTYPES[case.dtype].itemsize, case["rows"], case["n"]
    if case.params["mask"] == "length":
        return float(sum(lengths(case)) * item + rows * 4), float(rows * n * item)
    return float((rows + (case.params["mask"] == "additive")) * n * item), float(rows * n * item)


def eager(y: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """PyTorch's own, after its own masking; with an additive mask in fp32, because the sum is not exact in a half type."""
    return torch.softmax(masked(x, mask), -1).to(x.dtype)


def fused(y: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same, for torch.compile to fuse. PyTorch 2.11 does not compile a write to `y`, which shares its storage with the
    lengths of a mask."""
    return torch.softmax(masked(x.float(), mask), -1).to(x.dtype)


def liger(y: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """https://linkedin.github.io/Liger-Kernel/Low-Level-APIs"""
    from liger_kernel.transformers.functional import liger_softmax

    return liger_softmax(x)


def quack(y: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """https://github.com/Dao-AILab/quack"""
    import quack

    return quack.softmax(x)


op = Op(
    "softmax",
    axes={"rows": size(), "n": size(1024)},
    tensors=tensors,
    reference=reference,
    params={"mask": ("none", "additive", "length")},
    flops=lambda case: 5.0 * case["rows"] * case["n"],  # the maximum, a difference, a power, a sum, a product
    traffic=traffic,
    arithmetic=lambda case: ("fma", "float32"),
    metric=GBPS,
    strided=("y", "x"),
    odd_shapes=({"rows": 3, "n": 1000}, {"rows": 5, "n": 77}),
    sizes={
        "small": [
            {"rows": 1, "n": 1},
            {"rows": 5, "n": 8},
            {"rows": 130, "n": 136},
            {"rows": 2, "n": 4096},
            {"rows": 3, "n": 8200},
        ],
        "nan": [{"rows": 64, "n": 128}, {"rows": 8, "n": 4096}],
        "large": [
            {"rows": 2049, "n": 8192},
            {"rows": 7, "n": 32776},
            {"rows": 300, "n": 128256},
            {"rows": 5, "n": 262144},
        ],
    },
)

ALL = ("float32", "float16", "bfloat16")
VECTORS = multiples(n=8)  # rows of 16-byte pieces
PLAIN = {"mask": ("none",)}
MOST_BYTES = 1 << 20  # of a row that a cluster of 8 blocks keeps in registers


def shared(case: Case) -> str | None:
    """Whether the registers of a cluster have a row."""
    most = MOST_BYTES // DTYPES[case.dtype].itemsize
    return None if case["n"] <= most else f"needs n <= {most}"


op.torch("torch", eager, baseline=True, returns=(0,), dtypes=ALL)
op.torch("torch_compile", compiled(fused), returns=(0,), dtypes=ALL)
op.peer(
    "liger",
    liger,
    package="liger_kernel",
    returns=(0,),
    dtypes=ALL,
    params=PLAIN,
    requires=at_most(n=65536),  # more is an error of its own
)
op.peer("quack", quack, package="quack", returns=(0,), dtypes=ALL, params=PLAIN, requires=VECTORS)
op.cuda("v01_naive.cu", dtypes=ALL)
op.cuda("v02_online.cu", dtypes=ALL)
op.cuda("v03_one_read.cu", dtypes=ALL, requires=VECTORS)
op.cuda("v04_split_rows.cu", dtypes=ALL, requires=VECTORS)
op.cuda("v05_cluster.cu", archs="sm_90a", dtypes=ALL, requires=both(VECTORS, shared))
op.cuda("v05_cluster.cu", name="v05_cluster_small", archs="sm_90a", dtypes=ALL, requires=both(VECTORS, shared))
op.cuda("v06_bulk_copies.cu", archs="sm_90a", dtypes=ALL, requires=shared)
op.cuda("v07_short_rows.cu", dtypes=ALL, requires=at_most(n=1024), preferred="short_rows")
op.triton("triton_rows.py", dtypes=ALL)
op.cpp("cpu_naive.cpp", dtypes=ALL)
op.cpp("cpu_vectors.cpp", dtypes=ALL)
op.function("softmax", lambda minfer, y, x, mask: minfer.softmax(x), returns=(0,), dtypes=ALL, params=PLAIN)
op.draws("scores_or_logits")
