"""embedding: row i of y is row ids[i] of the table; what a decoder starts with.

y is (tokens, hidden) and table (vocab, hidden), of one dtype, row-major; their rows may lie apart. ids is (tokens,), int64
or int32 (`params.ids`). An id that is negative or not below vocab gives a row of NaN: a kernel must not read beyond the
table, and cannot raise without a wait for the device. Values are copied, so results are exact.
"""

from __future__ import annotations

import torch

from minfer.ops import (
    DTYPES,
    GBPS,
    Case,
    Expected,
    Op,
    Spec,
    Tensors,
    compiled,
    exact,
    given,
    integers,
    multiples,
    out,
    size,
)  # fmt: skip


def tensors(case: Case) -> list[Spec]:
    tokens, vocab, hidden = case["tokens"], case["vocab"], case["hidden"]
    return [
        out("y", tokens, hidden),
        given("ids", tokens, dtype=case.params["ids"], fill=integers(0, vocab)),
        given("table", vocab, hidden),
    ]


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """The rows themselves."""
    return {"y": exact(t["table"][t["ids"].long()])}


def traffic(case: Case) -> tuple[float, float]:
    """Of the table, each row once that is asked for: `tokens` draws out of `vocab` rows are expected to be
    vocab (1 - (1 - 1 / vocab)^tokens) different ones."""
    tokens, vocab, item = case["tokens"], case["vocab"], DTYPES[case.dtype].itemsize
    different = vocab * (1 - (1 - 1 / vocab) ** tokens)
    row = float(case["hidden"] * item)
    return different * row + tokens * DTYPES[case.params["ids"]].itemsize, tokens * row


def eager(y: torch.Tensor, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """PyTorch's own."""
    return torch.nn.functional.embedding(ids, table)


op = Op(
    "embedding",
    axes={"tokens": size(), "vocab": size(1024), "hidden": size(1024)},
    params={"ids": ("int64", "int32")},
    tensors=tensors,
    reference=reference,
    traffic=traffic,
    metric=GBPS,
    strided=("y", "table"),
    odd_shapes=({"tokens": 3, "vocab": 50, "hidden": 1000}, {"tokens": 1, "vocab": 5, "hidden": 77}),
    sizes={
        "small": [
            {"tokens": 3, "vocab": 2, "hidden": 1},
            {"tokens": 5, "vocab": 100, "hidden": 8},
            {"tokens": 70, "vocab": 300, "hidden": 136},
            {"tokens": 2, "vocab": 40, "hidden": 4104},
            {"tokens": 5, "vocab": 40, "hidden": 4104},
        ],
        "large": [
            {"tokens": 128, "vocab": 32000, "hidden": 4096},
            {"tokens": 4099, "vocab": 32000, "hidden": 4096},
            {"tokens": 300, "vocab": 5000, "hidden": 16384},
        ],
    },
)

ALL = ("float32", "float16", "bfloat16")
VECTORS = multiples(hidden=8)  # rows of 16-byte pieces


op.torch("torch", eager, baseline=True, returns=(0,), dtypes=ALL)
op.torch("torch_compile", compiled(eager), returns=(0,), dtypes=ALL)
op.cuda("v01_naive.cu", dtypes=ALL)
op.cuda("v02_vectors.cu", dtypes=ALL, requires=VECTORS)
op.triton("triton_rows.py", dtypes=ALL)
op.cpp("cpu_rows.cpp", dtypes=ALL)
