"""dequant: the weights of a quantised matrix as floats, y (n, k) in float32, float16 or bfloat16.

Formats and their layouts: `minfer/ops/quantised.py`. Arithmetic is fp32 and the result is rounded once to the dtype of y, so
that each element has one right value: in fp32 the bits that the `gguf` package gives.
"""

from __future__ import annotations

import torch

from minfer.ops import Case, Expected, Op, Spec, Tensors, compiled, exact, multiple_of, out, size
from minfer.ops.quantised import FORMATS, dequantised, name_of, weight_specs, whole_blocks
from minfer.ops.tensors import DTYPES

FORMS = tuple(name for name in FORMATS if name != "fp8_fp8")
Tensor = torch.Tensor


def tensors(case: Case) -> list[Spec]:
    return [out("y", case["n"], case["k"]), *weight_specs(case)]


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    scales, zeros = (t[name].float() for name in ("scales", "zeros"))
    w = t["w"].float() if t["w"].is_floating_point() else t["w"]
    return {"y": exact(dequantised(case.params["format"], w, scales, zeros).to(DTYPES[case.dtype]).double())}


def eager(y: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The definition by PyTorch's own functions, a dozen launches."""
    return dequantised(name_of(w), w, scales, zeros).to(y.dtype)


op = Op(
    "dequant",
    axes={"n": size(), "k": multiple_of(256, 1024)},
    params={"format": FORMS},
    tensors=tensors,
    reference=reference,
    odd_shapes=({"n": 3, "k": 256}, {"n": 7, "k": 1280}),
    sizes={
        "small": [{"n": 33, "k": 512}],
        "large": [{"n": 300, "k": 4096}, {"n": 4097, "k": 2304}],
    },
)

ALL = ("float32", "float16", "bfloat16")
op.torch("torch", eager, baseline=True, returns=(0,), dtypes=ALL, requires=whole_blocks)
op.torch("torch_compile", compiled(eager), returns=(0,), dtypes=ALL, requires=whole_blocks)
op.cuda("v01_naive.cu", dtypes=ALL, requires=whole_blocks)
op.cuda("v02_vectors.cu", dtypes=ALL, requires=whole_blocks)

op.triton("triton_blocks.py", dtypes=ALL, requires=whole_blocks)
op.cpp("cpu_naive.cpp", dtypes=ALL, requires=whole_blocks)
