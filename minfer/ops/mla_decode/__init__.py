"""mla_decode: softmax(scale q cᵀ) c[:512] of one to eight new tokens a sequence, over a cache of latents.

Multi-head latent attention (DeepSeek-V2, 2024) caches one row a token, which all heads share: a latent of 512 elements, and
behind it a key of 64 elements that is rotated by the position (RoPE). Each head's key and value are linear maps of the latent.
Here these maps are absorbed: the caller has applied the key map to the query, and applies the value map to out. So all heads
read the whole row as their key, and its first 512 elements as their value.

    q      (batch, new, heads, 576)  the absorbed query: 512 elements for the latent, 64 for the rotated key
    cache  (blocks, slots, 576)      latents with their rotated keys
    out    (batch, new, heads, 512)  weighted sums of latents, in q's half type; sums are fp32, and out is rounded once

lengths, int32 (batch,), says how many keys each sequence has, including its new tokens. Query i of sequence b is at position
lengths[b] - new + i, and sees the keys up to that position. A query at a negative position sees none; its out is 0.

`params.page` is the layout of the cache:

    none  a block holds a sequence, and its slots are the positions. page_table is (batch, 0).
    64    a block is a page of 64 slots. Position j of sequence b is slot j % 64 of page page_table[b, j // 64], int32.

scale belongs to the model. DeepSeek-V2's is 1 / sqrt(192), for keys of 128 + 64 elements; YaRN multiplies it by a factor.

In every test, slots beyond a sequence's length and pages that no sequence uses hold NaN, and unused entries of the page table
hold indices out of bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minfer.ops import (
    DTYPES,
    TFLOPS,
    Case,
    Draw,
    Expected,
    Op,
    Ragged,
    Spec,
    Tensors,
    fixed,
    given,
    one_of,
    out,
    size,
    within,
)  # fmt: skip
from minfer.ops.attention_reference import Rows, attend
from minfer.ops.decode_attention import Queries, blocks_of, keys_of_queries, lengths_of, page_of, rows_of
from minfer.ops.mla_decode import baselines
from minfer.ops.mla_decode.baselines import LATENT, ROW, SCALE


@dataclass(frozen=True)
class Latents(Rows):
    """Fills the cache as `Rows` fills keys of one head."""

    def make(self, tensor: torch.Tensor, made: Tensors, draw: Draw) -> None:
        super().make(tensor[:, :, None], made, draw)


def tensors(case: Case) -> list[Spec]:
    blocks, table, unused = blocks_of(case, "cache")
    rows = (case["batch"], case["new"], case["heads"])
    return [
        out("out", *rows, LATENT),
        given("q", *rows, ROW, fill=Queries(1.0, 0.0, None)),
        given("lengths", case["batch"], dtype="int32", fill=fixed(lengths_of(case))),
        table,
        given("cache", blocks, page_of(case), ROW, fill=Latents(1.0, 0.0, unused, False)),
    ]


def reference(case: Case, t: Tensors, scale: float) -> dict[str, Expected]:
    """The result in fp64, a query at a time. The bound is that of prefill_attention with one head of keys and values."""
    shape = (*t["q"].shape[:3], LATENT)
    value, bound = t["q"].new_zeros(shape), t["q"].new_zeros(shape)
    for number, count in enumerate(lengths_of(case)):
        rows = rows_of(case, t, "cache", number, count)[:, None]
        for query in range(case["new"]):
            keys = count - case["new"] + query + 1
            if keys > 0:
                q, seen = t["q"][number, query : query + 1], torch.ones(1, keys, dtype=torch.bool, device=rows.device)
                found = attend(q, rows[:keys], rows[:keys, :, :LATENT], seen, 0.0, DTYPES[case.dtype], scale)
                value[number, query], bound[number, query] = found[0][0], found[1][0]
    return {"out": within(value, bound)}


def traffic(case: Case) -> tuple[float, float]:
    """Bytes read and written. Read: queries, lengths, page table, and each sequence's rows once for all heads. Written: out."""
    heads, width = 1.0 * case["batch"] * case["new"] * case["heads"], DTYPES[case.dtype].itemsize
    counts = lengths_of(case)
    entries = sum(-(-count // page_of(case)) for count in counts) if case.params["page"] != "none" else 0
    read = (heads + sum(counts)) * ROW * width + 4.0 * (len(counts) + entries)
    return read, heads * LATENT * width


def shape(batch: int, new: int, longest: int, heads: int) -> dict[str, int]:
    return {"batch": batch, "new": new, "longest": longest, "heads": heads}


op = Op(
    "mla_decode",
    axes={"batch": size(4), "new": one_of(*range(1, 9)), "longest": size(120), "heads": size(8)},
    params={"page": ("none", "64"), "lengths": Ragged(examples=("full", "gaps:1"))},
    tensors=tensors,
    reference=reference,
    calls={
        "deepseek": {"scale": SCALE},
        "yarn": {"scale": SCALE * 1.8738},  # DeepSeek-V3's factor of 40: (0.1 ln 40 + 1)²
    },
    flops=lambda case: 2.0 * (ROW + LATENT) * sum(keys_of_queries(case)) * case["heads"],
    traffic=traffic,
    arithmetic=lambda case: (case.dtype, "float32"),
    metric=TFLOPS,
    strided=("out", "q", "cache"),
    odd_shapes=(shape(3, 1, 37, 4), shape(1, 3, 70, 3)),
    sizes={
        "small": [shape(1, 1, 1, 1), shape(1, 1, 17, 2), shape(3, 8, 19, 3)],
        "large": [shape(64, 1, 1500, 128), shape(2, 8, 5000, 16), shape(1, 1, 131072, 128), shape(7, 2, 3000, 64)],
    },
)

baselines.register(op)
op.triton("triton_split.py")  # not last, because `best` takes the last one before anything was measured
op.cuda("v01_naive.cu")
op.cuda("v02_split.cu")
op.cuda("v03_wgmma.cu", archs="sm_90a")
op.cuda("v04_cluster.cu", archs="sm_90a")
op.cpp("cpu_naive.cpp")
