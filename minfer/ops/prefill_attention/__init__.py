"""prefill_attention: softmax(scale q kᵀ) v (Vaswani et al., Attention is all you need, 2017), many queries at once.

Query head h reads key-value head h // (heads / kv_heads): MHA, GQA (Ainslie et al., 2023) or MQA. scale is 1 / sqrt(head_dim).
q, k, v and out are of one half type; sums are fp32, and out is rounded once. Rows of v and out may have another length than
those of q and k: an axis `v_dim` says so, of 128 where head_dim is 192, as in the multi-head latent attention of DeepSeek-V2
(2024) before its latents are absorbed.

`params.layout` says how sequences lie:

    padded  q is (batch, seq_q, heads, head_dim), k (batch, seq_kv, kv_heads, head_dim), v (batch, seq_kv, kv_heads, v_dim), and
            out (batch, seq_q, heads, v_dim). q_seqlens and kv_seqlens are empty, or int32 (batch,): how many tokens of each
            sequence count. out of the others is 0. Kernels also take kv_seqlens alone; then all queries count.
    packed  q and out are (tokens, heads, …), one sequence after the other without padding, k and v likewise.
            q_seqlens and kv_seqlens are int32 (batch + 1,), cumulative from 0: `cu_seqlens`.

`params.page` is none, or the slots of a page of a cache that keeps keys and values, as in decode_attention:

    1, 16, 64   k is (pages, page, kv_heads, head_dim), and v likewise. Key j of sequence b is slot j % page of page
                page_table[b, j // page], int32 (Kwon et al., Efficient memory management for large language model serving with
                PagedAttention, 2023). kv_seqlens is int32 (batch,) in both layouts, and q_seqlens is never empty.

Pages of no sequence and slots behind a sequence's last key are NaN in every test; the table's tails are absurd.

`params.quant` is none, for keys and values of the dtype of q; or fp8, for keys and values of e4m3 that keep value / scale, with
a scale of k and one of v in `scales`, fp32, as `kv_append` writes them. There is then a page_table in any case: (batch, 0)
where keys and values are not in pages.

`params.lengths` draws the lengths, the same part of seq_q and of seq_kv for a sequence. What lies behind them in q, k and v is
not used: it is NaN in every test.

A sequence's last query sees its last key. Query i of a sequence is at position p = i + keys - queries: with more keys than
queries, these follow a cached prefix (chunked prefill). With `causal`, key j is seen where j <= p. With a `window` above 0,
it is seen where also |p - j| < window. `softcap` above 0 puts softcap * tanh(score / softcap) in the place of a score
(Gemma 2). A query that sees no key has an out of 0.

`params.lse` is no, where lse is empty, or yes: fp32, the logarithm of the sum of exp(score) of each query, -inf where it sees
no key; (batch, heads, seq_q), or (heads, tokens) of packed sequences.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from minfer.ops import (
    DTYPES,
    TFLOPS,
    Case,
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
    offsets,
    one_of,
    out,
    page_table,
    size,
    within,
)  # fmt: skip
from minfer.ops.attention_reference import LATENT, Rows, attend, heads_of, v_dim
from minfer.ops.axes import Axis, Sizes
from minfer.ops.prefill_attention import baselines

TAIL = 16  # rows of poison behind the keys of packed sequences
SPARE = 2  # pages of no sequence
SCALES = (0.75, 1.25)  # of k and of v in fp8
MOST_SCORES = 1 << 25  # that the reference has at once: 256 MB in fp64
Tensor = torch.Tensor


def is_packed(case: Case) -> bool:
    return case.params["layout"] == "packed"


def page_of(case: Case) -> int:
    """Slots of a page; 0 where keys and values are not in pages."""
    page = case.params.get("page", "none")
    return 0 if page == "none" else int(page)


def is_quantised(case: Case) -> bool:
    return case.params.get("quant", "none") == "fp8"


def lengths_of(case: Case) -> list[tuple[int, int]]:
    """Queries and keys of each sequence."""
    of_q, of_kv = (lengths(case.params["lengths"], case["batch"], case[axis]) for axis in ("seq_q", "seq_kv"))
    return list(zip(of_q, of_kv, strict=True))


def spans(queries: int, keys: int, causal: bool, window: int) -> tuple[Tensor, Tensor]:
    """The first key that each query of a sequence sees, and the one behind the last."""
    position = torch.arange(queries) + keys - queries
    begin = (position - window + 1).clamp(0) if window else torch.zeros_like(position)
    behind = position + (1 if causal else window) if causal or window else torch.full_like(position, keys)
    return begin, torch.maximum(behind.clamp(0, keys), begin)


def behind(counts: list[int], longest: int) -> Tensor:
    """Which tokens of a padded batch lie behind the lengths, (batch, longest, 1, 1)."""
    return (torch.arange(longest) >= torch.tensor(counts)[:, None])[:, :, None, None]


def pages_of(case: Case) -> list[int]:
    """How many pages each sequence has; none where keys are not in pages."""
    page = page_of(case)
    return [-(-keys // page) for _, keys in lengths_of(case)] if page else []


def tensors(case: Case) -> list[Spec]:
    batch, heads, kv_heads, dim = case["batch"], case["heads"], case["kv_heads"], case["head_dim"]
    queries, keys = (list(of) for of in zip(*lengths_of(case), strict=True))
    of_q: tuple[int, ...] = (batch, case["seq_q"])
    of_kv: tuple[int, ...] = (batch, case["seq_kv"])
    of_lse: tuple[int, ...] = (batch, heads, case["seq_q"])
    page, used = page_of(case), pages_of(case)
    seqlens: list[list[int]] = [[], []]
    masks: list[Tensor | None] = [None, None]
    if is_packed(case):
        total = sum(queries)
        of_q, of_kv, of_lse = (total,), (sum(keys) + TAIL,), (heads, total)
        seqlens = [offsets(queries), offsets(keys)]
        masks[1] = (torch.arange(sum(keys) + TAIL) >= sum(keys))[:, None, None]
    elif case.params["lengths"] != "full" or page:
        seqlens = [queries, keys]
        masks = [behind(queries, case["seq_q"]), behind(keys, case["seq_kv"])]

    def rows(mask: Tensor | None, is_query: bool) -> Rows:
        return Rows(1.0, 0.0, None if mask is None else lambda made: mask.to(made["out"].device), is_query)

    def unused(made: Tensors) -> Tensor:
        """The slots without a key, (pages, page, 1, 1)."""
        free = torch.ones(sum(used) + SPARE, page, dtype=torch.bool)
        for row, count, number in zip(made["page_table"].cpu().long(), used, keys, strict=True):
            free[row[:count]] = torch.arange(count * page).view(count, page) >= number
        return free.to(made["out"].device)[:, :, None, None]

    of_k, table = rows(masks[1], False), []
    if page:
        of_kv, seqlens[1], of_k = (sum(used) + SPARE, page), keys, Rows(1.0, 0.0, unused, False)
        fill = page_table(used, of_kv[0], ["k", "v"])
        table = [given("page_table", batch, max(used), dtype="int32", fill=fill)]
    dtype, scales = "", []
    if is_quantised(case):
        dtype, table = "float8_e4m3fn", table or [given("page_table", batch, 0, dtype="int32", fill=fixed(()))]
        fill = made_by(lambda made, draw, device: torch.tensor(SCALES, device=device))
        scales = [given("scales", 2, dtype="float32", fill=fill)]
    return [
        out("out", *of_q, heads, v_dim(case)),
        out("lse", *(of_lse if case.params["lse"] == "yes" else (0,)), dtype="float32"),
        given("q", *of_q, heads, dim, fill=rows(masks[0], True)),
        *table,
        given("k", *of_kv, kv_heads, dim, dtype=dtype, fill=of_k),
        given("v", *of_kv, kv_heads, v_dim(case), dtype=dtype, fill=floats(poison=of_k.poison)),
        given("q_seqlens", len(seqlens[0]), dtype="int32", fill=fixed(seqlens[0])),
        given("kv_seqlens", len(seqlens[1]), dtype="int32", fill=fixed(seqlens[1])),
        *scales,
    ]


def reference(case: Case, t: Tensors, causal: bool, window: int, softcap: float) -> dict[str, Expected]:
    """In fp64, some queries of a sequence at a time."""
    shape = t["q"].shape
    made = {name: t["q"].new_zeros((*shape[:-1], v_dim(case))) for name in ("out", "bound")}
    made["lse"] = t["q"].new_full((*shape[:-3], shape[-2], shape[-3]), -math.inf)
    made["lse_bound"] = torch.zeros_like(made["lse"])
    first_q = first_kv = 0
    for sequence, (queries, keys) in enumerate(lengths_of(case)):
        of: Any = slice(first_q, first_q + queries) if is_packed(case) else (sequence, slice(queries))
        of_kv: Any = slice(first_kv, first_kv + keys) if is_packed(case) else (sequence, slice(keys))
        first_q, first_kv = first_q + queries, first_kv + keys
        if page := page_of(case):
            pages = t["page_table"][sequence, : -(-keys // page)].long()
            k, v = (t[name][pages].flatten(0, 1)[:keys] for name in ("k", "v"))
        else:
            k, v = (t[name][of_kv] for name in ("k", "v"))
        if is_quantised(case):
            k, v = (x * scale for x, scale in zip((k, v), t["scales"], strict=True))
        q = t["q"][of]
        rows = max(1, MOST_SCORES // (max(1, keys) * case["heads"]))
        begin, end = spans(queries, keys, causal, window)
        for row in range(0, queries, rows):
            some = slice(row, row + rows)
            low, high = int(begin[some].min()), int(end[some].max())
            if high <= low:
                continue
            column = torch.arange(low, high)
            seen = ((column >= begin[some, None]) & (column < end[some, None])).to(q.device)
            found = attend(q[some], k[low:high], v[low:high], seen, softcap, DTYPES[case.dtype])
            for name, values in zip(made, found, strict=True):
                each = made[name] if name in ("out", "bound") else made[name].transpose(-1, -2)
                each[of][some] = values
    lse = within(made["lse"], made["lse_bound"])
    if case.params["lse"] == "no":
        lse = within(t["q"].new_zeros(0), t["q"].new_zeros(0))
    return {"out": within(made["out"], made["bound"]), "lse": lse}


def spans_of(case: Case) -> list[tuple[Tensor, Tensor]]:
    call = op.call(case)
    return [spans(queries, keys, call["causal"], call["window"]) for queries, keys in lengths_of(case)]


def pairs(case: Case) -> int:
    """How many pairs of a query and a key it sees there are, for one head."""
    return sum(int((end - begin).sum()) for begin, end in spans_of(case))


def traffic(case: Case) -> tuple[float, float]:
    """Queries that there are, keys and values that any query sees, and where they lie; all of out and of lse."""
    of_q, of_out = (1.0 * dim * DTYPES[case.dtype].itemsize for dim in (case["head_dim"], v_dim(case)))
    of_k_and_v = (of_q + of_out) / (DTYPES[case.dtype].itemsize if is_quantised(case) else 1)
    queries = sum(queries for queries, _ in lengths_of(case))
    seen = [
        (int(begin.min()), int(end.max())) for begin, end in spans_of(case) if len(begin) and end.max() > begin.min()
    ]
    keys, page = sum(end - begin for begin, end in seen), page_of(case)
    entries = sum(-(-end // page) - begin // page for begin, end in seen) if page else 0
    written = queries if is_packed(case) else case["batch"] * case["seq_q"]
    lse = 4.0 * written * case["heads"] if case.params["lse"] == "yes" else 0.0
    read = of_q * queries * case["heads"] + of_k_and_v * keys * case["kv_heads"]
    return read + 4.0 * entries, of_out * written * case["heads"] + lse


def check_v_dim(size: int, sizes: Sizes) -> str | None:
    if size == sizes["head_dim"] or (sizes["head_dim"], size) == LATENT:
        return None
    return f"must be head_dim={sizes['head_dim']}, or {LATENT[1]} where head_dim={LATENT[0]}"


def draw_v_dim(rng: random.Random, sizes: Sizes) -> int:
    return LATENT[1] if sizes["head_dim"] == LATENT[0] and rng.random() < 0.5 else sizes["head_dim"]


def shape(
    batch: int, seq_q: int, seq_kv: int, heads: int, kv_heads: int, head_dim: int, v_dim: int = 0
) -> dict[str, int]:
    sizes = {
        "batch": batch, "seq_q": seq_q, "seq_kv": seq_kv, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim
    }  # fmt: skip
    return sizes | ({"v_dim": v_dim} if v_dim else {})


def attention(minfer: Any, *tensors: Tensor, causal: bool, window: int, softcap: float) -> Any:
    _, _, q, table, k, v, seqlens, scales = baselines.named(*tensors)
    given = {} if table is None else {"page_table": table, "lengths": seqlens}
    return minfer.attention(
        q, k, v, causal=causal, window=window or None, softcap=softcap or None, scales=scales, **given
    )


op = Op(
    "prefill_attention",
    axes={
        "batch": size(3),
        "seq_q": size(48),
        "seq_kv": size(80),
        "heads": size(4),
        "kv_heads": divides("heads"),
        "head_dim": one_of(64, 96, 128, 192, 256),
        "v_dim": Axis(check_v_dim, draw_v_dim, default="head_dim"),
    },
    params={
        "layout": ("padded", "packed"),
        "lengths": Ragged(examples=("full", "gaps:1")),
        "lse": ("no", "yes"),
        "page": ("none", "1", "16", "64"),
        "quant": ("none", "fp8"),
    },
    later=("page", "quant"),
    tensors=tensors,
    reference=reference,
    calls={
        "causal": {"causal": True, "window": 0, "softcap": 0.0},
        "full": {"causal": False, "window": 0, "softcap": 0.0},
        "window": {"causal": True, "window": 4096, "softcap": 0.0},  # Mistral 7B's
        "softcap": {"causal": True, "window": 0, "softcap": 50.0},  # Gemma 2's
        "narrow": {"causal": True, "window": 20, "softcap": 2.0},  # of small shapes, too, with both at once
        "narrow_full": {"causal": False, "window": 20, "softcap": 0.0},
    },
    flops=lambda case: 2.0 * pairs(case) * case["heads"] * (case["head_dim"] + v_dim(case)),
    traffic=traffic,
    arithmetic=lambda case: (case.dtype, "float32"),
    metric=TFLOPS,
    strided=("out", "q", "k", "v"),
    odd_shapes=(
        shape(3, 37, 37, 2, 1, 64),
        shape(1, 5, 70, 4, 2, 128),
        shape(2, 19, 33, 2, 1, 96),
        shape(1, 9, 35, 2, 1, 192, 128),
    ),
    sizes={
        "small": [shape(1, 1, 1, 1, 1, 64), shape(3, 66, 66, 2, 2, 64), shape(1, 40, 9, 1, 1, 256)],
        "large": [
            shape(2, 1000, 1000, 8, 2, 128),
            shape(1, 129, 3000, 4, 4, 64),
            shape(7, 300, 517, 6, 1, 256),
            shape(2, 700, 900, 6, 2, 96),
            shape(2, 500, 800, 6, 2, 192, 128),
            shape(1, 300, 300, 3, 3, 192),
            shape(1, 2048, 2048, 32, 8, 128),
        ],
    },
)

WHOLE, PAGED, BOXES = ({"page": pages, "quant": ("none",)} for pages in (("none",), ("1", "16", "64"), ("16", "64")))
FP8 = {"quant": ("fp8",)}
MOST_COPIED = 1 << 29  # bytes that v15_gathered and v16_fp8_gathered copy keys and values to


def copied_at_once(case: Case) -> str | None:
    needed = 2 * case["batch"] * case["seq_kv"] * case["kv_heads"] * (case["head_dim"] + v_dim(case))
    return f"copies k and v, at most {MOST_COPIED} bytes, got {needed}" if needed > MOST_COPIED else None


COPIED = both(heads_of(64, 96, 128, latent=True), copied_at_once)
baselines.register(op)
op.cuda("v01_naive.cu", params=WHOLE)
op.cuda("v02_flash.cu", params=WHOLE, requires=heads_of(64, 96, 128, 256, latent=True))
op.cuda("v03_mma.cu", params=WHOLE, preferred="mma", before_hopper="before_hopper")
op.cuda("v04_wgmma.cu", params=WHOLE, archs="sm_90a")
op.cuda("v05_pingpong.cu", params=WHOLE, archs="sm_90a", preferred="in_turns")
op.cuda(
    "v06_no_maximum.cu",
    params=WHOLE,
    archs="sm_90a",
    requires=heads_of(64, 96, 128, latent=True),
    preferred="no_maximum",
)
op.cuda("v07_short.cu", params=WHOLE, archs="sm_90a", requires=heads_of(64, 128), preferred="heads_together")
op.cuda(
    "v08_compact.cu",
    params=WHOLE,
    archs="sm_90a",
    requires=heads_of(64, 96, 128, latent=True),
    preferred="compact",
    entries=("sinks",),
)
op.cuda("v09_paged.cu", params=PAGED, preferred="paged_mma")
op.cuda("v15_gathered.cu", params=PAGED, archs="sm_90a", requires=COPIED, preferred="gathered")
op.cuda("v16_fp8_gathered.cu", params=FP8, archs="sm_90a", requires=COPIED, preferred="fp8_gathered")
op.cuda(
    "v10_paged_boxes.cu",
    params=BOXES,
    archs="sm_90a",
    requires=heads_of(64, 96, 128, latent=True),
    preferred="boxes",
)
op.cuda("v11_paged_short.cu", params=BOXES, archs="sm_90a", requires=heads_of(64, 128), preferred="short_boxes")
op.cuda("v18_paged_parts.cu", params=BOXES, archs="sm_90a", requires=heads_of(64, 128), preferred="parts_of_pages")
op.cuda("v12_fp8.cu", params=FP8, preferred="fp8_mma")
op.cuda(
    "v13_wide_heads.cu",
    params=WHOLE,
    archs="sm_90a",
    requires=heads_of(192, 256, latent=True),
    preferred="wide_heads",
)
op.cuda("v14_key_parts.cu", params=WHOLE, archs="sm_90a", requires=heads_of(64, 128), preferred="few_tiles")
op.cuda(
    "v17_wide_parts.cu",
    params=WHOLE,
    archs="sm_90a",
    requires=heads_of(192, 256, latent=True),
    preferred="few_wide_tiles",
)
op.triton("triton_flash.py", params=WHOLE, requires=heads_of(64, 128, 256))
op.cpp("cpu_naive.cpp", params=WHOLE)
op.cpp("cpu_naive.cpp", name="cpu_naive_paged", params=PAGED)
op.cpp("cpu_naive.cpp", name="cpu_naive_fp8", params=FP8)
op.cpp("cpu_blocked.cpp", params=WHOLE)
op.cpp("cpu_blocked.cpp", name="cpu_blocked_paged", params=PAGED)
op.function(
    "attention",
    attention,
    returns=(0,),
    params={"layout": ("padded",), "lengths": ("full",), "lse": ("no",)},
)
op.draws(
    "prompts",
    without={
        "torch_flex": "compiles for many seconds at each shape",
        "torch_eager": "launches several kernels for each sequence",
    },
)
