"""gated_unit: y = sigmoid(x W1 + b1) * (x W2 + b2) (Dauphin et al., Language modeling with gated convolutional networks, ICML
2017), or SwiGLU, y = silu(x W1) * (x W2) (Shazeer, GLU variants improve transformer, 2020), as the case's `gate` says.

x is (M, K), W1 and W2 are (K, N), biases (N,), y (M, N), all of one half type. The layout is the case's, as in hgemm: in `NN`
the weights are row-major; in `TN` they are stored as (N, K), as `nn.Linear` keeps them. Kernels get (K, N) views either way
and read their strides. SwiGLU has no biases: kernels get tensors without elements, and take SiLU when they do.
"""

from __future__ import annotations

import torch

from minfer.ops import (
    DTYPES,
    TFLOPS,
    Case,
    Expected,
    Op,
    Spec,
    Tensors,
    at_most,
    both,
    compiled,
    floats,
    given,
    multiples,
    out,
    size,
    within,
)  # fmt: skip
from minfer.ops.bounds import ROUNDOFF


def tensors(case: Case) -> list[Spec]:
    """The weights are as large as 1 / sqrt(K), so that the gate gets values of about 1, where it is neither open nor shut."""
    m, n, k = case["m"], case["n"], case["k"]
    order = (1, 0) if case.params["layout"] == "TN" else None
    fill, biases = floats(k**-0.5), 0 if case.params["gate"] == "swiglu" else n
    return [
        out("y", m, n),
        given("x", m, k),
        given("w1", k, n, fill=fill, order=order),
        given("b1", biases),
        given("w2", k, n, fill=fill, order=order),
        given("b2", biases),
    ]


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """Of each half h = x W + b, the sum of K + 1 terms has the bound of a dot product, and PyTorch's definition rounds it to
    the tensors' dtype before and after the bias: an error e. It goes through the gate times the largest slope, 1/4 of the
    sigmoid and 1.1 of SiLU; the gate itself takes some roundings in fp32, of which the exponential's argument has |h| times
    one, and is rounded to the dtype. So the product is off by |gate error| (|h2| + e2) + |gate| e2."""
    unit, terms = torch.finfo(DTYPES[case.dtype]).eps / 2, 4 * (case["k"] + 1) ** 0.5 * ROUNDOFF["float32"]
    sizes = t["x"].abs()

    def half(w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, error = t["x"] @ w, (sizes @ w.abs()).mul_(terms)
        if b.numel():
            value += b
            error += b.abs() * (terms + unit)
        return value, error.add_(value.abs(), alpha=2 * unit)

    (h1, e1), (h2, e2) = half(t["w1"], t["b1"]), half(t["w2"], t["b2"])
    gate, silu = h1.sigmoid(), case.params["gate"] == "swiglu"
    if silu:
        gate *= h1
    off = e1.mul_(1.1 if silu else 0.25).add_(gate.abs() * (unit + 8 * ROUNDOFF["float32"] * (1 + h1.abs())))
    bound = off.mul_(h2.abs() + e2).add_(gate.abs() * e2)
    return {"y": within(gate.mul_(h2), bound)}


def eager(
    y: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """The definition as one writes it."""
    if b1.numel() == 0:
        return torch.nn.functional.silu(x @ w1) * (x @ w2)
    return ((x @ w1) + b1).sigmoid() * ((x @ w2) + b2)


def in_place(
    y: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor
) -> None:  # fmt: skip
    """The same with one tensor beside the output: every step that may write to its operand does."""
    torch.mm(x, w1, out=y)
    up = torch.mm(x, w2)
    if b1.numel() == 0:
        torch.nn.functional.silu(y, inplace=True)
    else:
        y.add_(b1).sigmoid_()
        up.add_(b2)
    y.mul_(up)


def into(
    y: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor
) -> None:  # fmt: skip
    """The definition, for torch.compile to fuse what it can."""
    y.copy_(eager(y, x, w1, b1, w2, b2))


op = Op(
    "gated_unit",
    axes={"m": size(), "n": size(), "k": size()},
    params={"gate": ("sigmoid", "swiglu"), "layout": ("NN", "TN")},
    tensors=tensors,
    reference=reference,
    flops=lambda case: 4.0 * case["m"] * case["n"] * case["k"],
    arithmetic=lambda case: (case.dtype, "float32"),
    metric=TFLOPS,
    strided=("y", "x", "w1", "w2"),
    odd_shapes=({"m": 33, "n": 65, "k": 17}, {"m": 70, "n": 72, "k": 104}),
    sizes={
        "small": [{"m": 1, "n": 1, "k": 1}, {"m": 7, "n": 40, "k": 72}, {"m": 40, "n": 136, "k": 264}],
        "nan": [{"m": 64, "n": 128, "k": 64}, {"m": 8, "n": 64, "k": 128}],
        "large": [
            {"m": 16384, "n": 64, "k": 128},
            {"m": 1, "n": 4096, "k": 4096},
            {"m": 60, "n": 14336, "k": 512},
            {"m": 257, "n": 384, "k": 1000},
            {"m": 1024, "n": 1024, "k": 1024},
            {"m": 2550, "n": 1272, "k": 1032},
        ],
    },
)

VECTORS = multiples(n=8, k=8)  # rows of 16-byte pieces

op.torch("torch", eager, baseline=True, returns=(0,))
op.torch("torch_in_place", in_place)
op.torch("torch_compile", compiled(into))
op.cuda("v01_naive.cu")
op.cuda("v02_mma.cu", requires=VECTORS)
op.cuda("v03_wgmma.cu", archs="sm_90a", requires=VECTORS)
op.cuda("v04_rows.cu", archs="sm_90a", requires=both(VECTORS, at_most(k=128)))
op.cuda("v05_one_wave.cu", archs="sm_90a", requires=both(VECTORS, at_most(m=1024)), least_measured="n")
op.cuda("v06_early.cu", archs="sm_90a", requires=both(VECTORS, at_most(m=1024)), entries=("constant",), early=True)
op.cuda("v07_fitted.cu", archs="sm_90a", requires=VECTORS, preferred="rows_of_a_prompt")
op.triton("triton_fused.py")
op.cpp("cpu_naive.cpp")
op.cpp("cpu_blocked.cpp")
op.function(
    "swiglu",
    lambda minfer, y, x, w1, b1, w2, b2: minfer.swiglu(x, w1, w2),
    returns=(0,),
    params={"gate": ("swiglu",)},
)
op.draws("gated")
