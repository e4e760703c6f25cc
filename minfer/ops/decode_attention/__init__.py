"""decode_attention: softmax(scale q kᵀ) v of one to eight new tokens a sequence, over a key-value cache.

q is (batch, new, heads, head_dim), and out (batch, new, heads, v_dim). Query head h reads key-value head h // (heads /
kv_heads): MHA, GQA (Ainslie et al., 2023) or MQA. scale is 1 / sqrt(head_dim). q and out are of one half type; sums are fp32,
and out is rounded once. v_dim is 128 where head_dim is 192, as in the multi-head latent attention of DeepSeek-V2 (2024) before
its latents are absorbed, and head_dim elsewhere.

lengths, int32 (batch,), says how many keys each sequence has, its new tokens among them: query i of sequence b is at position
lengths[b] - new + i, and sees the keys up to its own. A query at a negative position sees none; its out is 0.

`params.page` says how the caches lie, (blocks, slots, kv_heads, head_dim) and (blocks, slots, kv_heads, v_dim):

    none          a block is a sequence, its slots are positions. page_table is (batch, 0).
    16, 64, 256   a block is a page of so many slots. Position j of sequence b is slot j % page of page
                  page_table[b, j // page], int32 (Kwon et al., Efficient memory management for large language model serving
                  with PagedAttention, 2023).

`params.quant` is none, for caches of the dtype of q, where scales is empty; or fp8, for caches of e4m3 that keep value / scale,
with a scale of k and one of v in `scales`, fp32, as `kv_append` writes them.

What lies behind a length, in its last page and in pages of no sequence, is NaN in every test; the table's tails are absurd.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minfer.ops import (
    DTYPES,
    GBPS,
    Case,
    Draw,
    Expected,
    Op,
    Ragged,
    Spec,
    Tensors,
    both,
    divides,
    fixed,
    floats,
    given,
    lengths,
    made_by,
    one_of,
    out,
    page_table,
    size,
    within,
)  # fmt: skip
from minfer.ops.attention_reference import LATENT, Rows, attend, heads_of, v_dim
from minfer.ops.axes import Axis, Sizes
from minfer.ops.decode_attention import baselines
from minfer.ops.tensors import Floats

SCALES = (0.75, 1.25)  # of k and of v in an fp8 cache
Tensor = torch.Tensor


def page_of(case: Case) -> int:
    """Slots of a block of the caches."""
    return case["longest"] if case.params["page"] == "none" else int(case.params["page"])


def lengths_of(case: Case) -> list[int]:
    return lengths(case.params["lengths"], case["batch"], case["longest"])


@dataclass(frozen=True)
class Queries(Floats):
    """Floats. The uniform ones, with which nothing is timed, have heads that a careless softmax fails on: every fourth has
    scores of several hundred, of both signs; every eighth has large products that cancel with the keys of `Rows`."""

    def make(self, tensor: Tensor, made: Tensors, draw: Draw) -> None:
        super().make(tensor, made, draw)
        if draw.distribution == "uniform":
            rows, half = tensor.view(-1, tensor.shape[-1]), tensor.shape[-1] // 2
            rows[1::4] *= 256
            rows[3::8] *= 64
            rows[3::8, half:] = -rows[3::8, :half]


def blocks_of(case: Case, *caches: str) -> tuple[int, Spec, Callable[[Tensors], Tensor]]:
    """How many blocks the caches of these names have; the page table; and what no sequence has in its blocks, as a function of
    the tensors that are made, (blocks, slots, 1, 1)."""
    batch, paged, page, counts = case["batch"], case.params["page"] != "none", page_of(case), lengths_of(case)
    used = [-(-count // page) for count in counts]
    blocks = sum(used) + 2 if paged else batch  # two pages of no sequence

    def unused(made: Tensors) -> Tensor:
        free = torch.ones(blocks, page, dtype=torch.bool)
        for number, count in enumerate(counts):
            blocks_of = made["page_table"][number, : used[number]].cpu().long() if paged else torch.tensor([number])
            rows = torch.arange(len(blocks_of) * page).view(-1, page) >= count
            free[blocks_of] = rows
        return free.to(made["page_table"].device)[:, :, None, None]

    if not paged:
        return blocks, given("page_table", batch, 0, dtype="int32", fill=fixed(())), unused
    fill = page_table(used, blocks, list(caches))
    return blocks, given("page_table", batch, max(used), dtype="int32", fill=fill), unused


def tensors(case: Case) -> list[Spec]:
    batch, quantised = case["batch"], case.params["quant"] == "fp8"
    blocks, table, unused = blocks_of(case, "k_cache", "v_cache")
    cache = (blocks, page_of(case), case["kv_heads"])
    dtype = "float8_e4m3fn" if quantised else ""
    scales = made_by(lambda made, draw, device: torch.tensor(SCALES[: 2 if quantised else 0], device=device))
    rows = (batch, case["new"], case["heads"])
    return [
        out("out", *rows, v_dim(case)),
        given("q", *rows, case["head_dim"], fill=Queries(1.0, 0.0, None)),
        given("lengths", batch, dtype="int32", fill=fixed(lengths_of(case))),
        table,
        given("k_cache", *cache, case["head_dim"], dtype=dtype, fill=Rows(1.0, 0.0, unused, False)),
        given("v_cache", *cache, v_dim(case), dtype=dtype, fill=floats(poison=unused)),
        given("scales", 2 if quantised else 0, dtype="float32", fill=scales),
    ]


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """In fp64, a query at a time. The bound is that of prefill_attention: the parts of a split add as blocks of one softmax do.

    Keys and values of an fp8 cache are exact in either half type. Kernels multiply them in float16 also where q is bfloat16,
    so that exponentials may be rounded to either."""
    value, bound = (t["q"].new_zeros((*t["q"].shape[:3], v_dim(case))) for _ in range(2))
    kinds = [torch.float16, torch.bfloat16] if len(t["scales"]) else [DTYPES[case.dtype]]
    for number, count in enumerate(lengths_of(case)):
        k, v = (rows_of(case, t, name, number, count) for name in ("k_cache", "v_cache"))
        for query in range(case["new"]):
            keys = count - case["new"] + query + 1
            if keys > 0:
                q, seen = t["q"][number, query : query + 1], torch.ones(1, keys, dtype=torch.bool, device=k.device)
                found = [attend(q, k[:keys], v[:keys], seen, 0.0, kind) for kind in kinds]
                value[number, query] = found[0][0]
                bound[number, query] = torch.stack([each[1] for each in found]).amax(0)
    return {"out": within(value, bound)}


def rows_of(case: Case, t: Tensors, name: str, number: int, count: int) -> Tensor:
    """The keys, or values, of a sequence, (count, kv_heads, head_dim)."""
    pages = t["page_table"][number, : -(-count // page_of(case))].long()
    rows = t[name][number, :count] if case.params["page"] == "none" else t[name][pages].flatten(0, 1)[:count]
    return rows * t["scales"][int(name == "v_cache")] if len(t.get("scales", ())) else rows


def keys_of_queries(case: Case) -> list[int]:
    """How many keys each query of one head sees."""
    new = case["new"]
    return [max(0, count - new + i + 1) for count in lengths_of(case) for i in range(new)]


def traffic(case: Case) -> tuple[float, float]:
    """Queries, keys and values of every sequence, and where they lie; out."""
    rows = 1.0 * case["batch"] * case["new"] * case["heads"] * DTYPES[case.dtype].itemsize
    counts, stored = lengths_of(case), 1 if case.params["quant"] == "fp8" else DTYPES[case.dtype].itemsize
    entries = sum(-(-count // page_of(case)) for count in counts) if case.params["page"] != "none" else 0
    cached = 1.0 * sum(counts) * case["kv_heads"] * (case["head_dim"] + v_dim(case)) * stored
    return rows * case["head_dim"] + cached + 4.0 * (len(counts) + entries), rows * v_dim(case)


def v_dim_beside(head_dim: int) -> int:
    return LATENT[1] if head_dim == LATENT[0] else head_dim


def check_v_dim(size: int, sizes: Sizes) -> str | None:
    wanted = v_dim_beside(sizes["head_dim"])
    return None if size == wanted else f"must be {wanted} where head_dim={sizes['head_dim']}"


def draw_v_dim(rng: random.Random, sizes: Sizes) -> int:
    return v_dim_beside(sizes["head_dim"])


def shape(
    batch: int, new: int, longest: int, heads: int, kv_heads: int, head_dim: int, v_dim: int = 0
) -> dict[str, int]:
    sizes = {
        "batch": batch, "new": new, "longest": longest, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim
    }  # fmt: skip
    return sizes | ({"v_dim": v_dim} if v_dim else {})


op = Op(
    "decode_attention",
    axes={
        "batch": size(4),
        "new": one_of(*range(1, 9)),
        "longest": size(120),
        "heads": size(8),
        "kv_heads": divides("heads"),
        "head_dim": one_of(64, 96, 128, 192, 256),
        "v_dim": Axis(check_v_dim, draw_v_dim, default="head_dim"),
    },
    params={
        "page": ("none", "16", "64", "256"),
        "lengths": Ragged(examples=("full", "gaps:1")),
        "quant": ("none", "fp8"),
    },
    tensors=tensors,
    reference=reference,
    flops=lambda case: 2.0 * sum(keys_of_queries(case)) * case["heads"] * (case["head_dim"] + v_dim(case)),
    traffic=traffic,
    arithmetic=lambda case: (case.dtype, "float32"),
    metric=GBPS,
    strided=("out", "q", "k_cache", "v_cache"),
    odd_shapes=(
        shape(3, 1, 37, 4, 2, 64),
        shape(1, 3, 70, 3, 1, 128),
        shape(2, 2, 50, 4, 2, 96),
        shape(1, 1, 35, 4, 2, 192, 128),
    ),
    sizes={
        "small": [shape(1, 1, 1, 1, 1, 64), shape(1, 1, 17, 2, 2, 64), shape(3, 8, 19, 3, 1, 64)],
        "large": [
            shape(64, 1, 1500, 32, 8, 128),
            shape(2, 8, 5000, 32, 8, 128),
            shape(1, 1, 131072, 8, 1, 128),
            shape(7, 2, 3000, 16, 8, 256),
            shape(3, 4, 700, 64, 1, 64),
            shape(3, 2, 1500, 32, 32, 96),
            shape(3, 1, 1500, 64, 4, 192, 128),
        ],
    },
)


def at_most_rows(case: Case) -> str | None:
    """The rule of a kernel whose product has all rows of a group at once."""
    rows = case["new"] * case["heads"] // case["kv_heads"]
    return f"takes up to 64 query rows of a key-value head, got {rows}" if rows > 64 else None


POWERS_OF_TWO = heads_of(64, 128, 256)
baselines.register(op)
op.cuda("v01_naive.cu")
op.cuda("v02_split.cu", requires=POWERS_OF_TWO)
op.cuda("v03_packed.cu", preferred="longer_keys")
op.cuda("v04_balanced.cu", requires=POWERS_OF_TWO)
op.cuda("v05_scored.cu", entries=("scored",))
op.cuda("v07_early.cu", archs="sm_90a", early=True)
op.triton("triton_split.py", requires=both(POWERS_OF_TWO, at_most_rows))
op.cpp("cpu_naive.cpp")
op.cpp("cpu_scored.cpp", entries=("scored",))
op.function(
    "decode_attention",
    lambda minfer, out, q, lengths, table, k_cache, v_cache, scales: minfer.decode_attention(
        q, k_cache, v_cache, lengths, page_table=table if table.numel() else None
    ),
    returns=(0,),
    params={"quant": ("none",)},
)
op.draws("decoding", without={"torch_eager": "launches several kernels for each sequence"})
