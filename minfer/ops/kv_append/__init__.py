"""kv_append: write the keys and values of new tokens to their places in a key-value cache.

k and v have a row of kv_heads * head_dim elements for each new token; they may lie apart, as parts of one projection do. Two
caches (`params.cache`), both (blocks, slots, kv_heads, head_dim) and changed in place:

contiguous: a block is a sequence, its slots are positions. k and v are (batch, new, width), where[i] is the position of the
    first new token of sequence i. A position outside of the cache is not written.
paged: a block is a page of 16 slots. k and v are (tokens, width), and where[t] = page * 16 + slot is the place of token t, an
    int64 slot mapping as vLLM has it (Kwon et al., Efficient memory management for large language model serving with
    PagedAttention, 2023). A place outside of the cache, -1 for padding, is not written: `params.padding` is none, or some
    for every eighth token, whose rows are NaN.

`params.quant` is none, for caches of the dtype of k and v, or fp8: then value / scale, saturated to 448, is rounded to
e4m3, with a scale of k and one of v in `scales`.
"""

from __future__ import annotations

import random

import torch

from minfer.ops import (
    DTYPES,
    GBPS,
    Case,
    Draw,
    Expected,
    Op,
    Rule,
    Spec,
    Tensors,
    both,
    exact,
    floats,
    given,
    inout,
    made_by,
    one_of,
    rounded,
    size,
    up_to,
)  # fmt: skip

PAGE, MOST = 16, 448.0
Tensor = torch.Tensor


def is_paged(case: Case) -> bool:
    return case.params["cache"] == "paged"


def is_padding(case: Case, token: int) -> bool:
    return case.params["padding"] == "some" and token % 8 == 7


def starts(case: Case, rng: random.Random) -> list[int]:
    """The positions of the first new tokens."""
    return [rng.randint(0, case["longest"] - case["new"]) for _ in range(case["batch"])]


def pages_of(case: Case) -> int:
    """Of one sequence."""
    return -(-case["longest"] // PAGE)


def tensors(case: Case) -> list[Spec]:
    batch, new, tokens = case["batch"], case["new"], case["batch"] * case["new"]
    width, paged = case["kv_heads"] * case["head_dim"], is_paged(case)
    blocks = (batch * pages_of(case), PAGE) if paged else (batch, case["longest"])
    quantised = case.params["quant"] == "fp8"
    dtype = "float8_e4m3fn" if quantised else case.dtype
    rows = (tokens, width) if paged else (batch, new, width)

    def places(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
        """Each sequence has pages of its own, drawn at random."""
        order = draw.random.sample(range(batch * pages_of(case)), batch * pages_of(case))
        table = torch.tensor(order).view(batch, -1)
        position = torch.tensor(starts(case, draw.random))[:, None] + torch.arange(new)
        found = (table.gather(1, position // PAGE) * PAGE + position % PAGE).flatten()
        found[[token for token in range(tokens) if is_padding(case, token)]] = -1
        return found.to(device)

    def positions(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
        return torch.tensor(starts(case, draw.random), device=device)

    def padded(made: Tensors) -> Tensor:
        return torch.tensor([is_padding(case, token) for token in range(tokens)], device=made["k_cache"].device)[
            :, None
        ]

    fill = floats(poison=padded) if case.params["padding"] == "some" else None
    found = [
        inout("k_cache", *blocks, case["kv_heads"], case["head_dim"], dtype=dtype),
        inout("v_cache", *blocks, case["kv_heads"], case["head_dim"], dtype=dtype),
        given("k", *rows, fill=fill),
        given("v", *rows, fill=fill),
        given("where", tokens if paged else batch, dtype="int64", fill=made_by(places if paged else positions)),
    ]
    if quantised:  # uniform or normal values of about 1 become some hundred, and a few of them are saturated
        scales = made_by(lambda made, draw, device: torch.tensor([0.004, 0.0071], device=device))
        found.append(given("scales", 2, dtype="float32", fill=scales))
    return found


def places_of(cache: Tensor, k: Tensor, where: Tensor) -> Tensor:
    """The place of each token in a cache whose blocks are one; out of range where there is none."""
    if k.dim() == 2:
        return where
    position = where[:, None] + torch.arange(k.shape[1], device=where.device)
    sequence = torch.arange(len(where), device=where.device)[:, None] * cache.shape[1]
    return (sequence + position).flatten()


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    """Copies are exact. A quotient takes at most three roundings in fp32: the reciprocal of the scale, the product, and one
    more for a product that is not quite the largest."""
    written = {}
    for name, number in (("k", 0), ("v", 1)):
        cache = t[f"{name}_cache"].clone()
        place, rows = places_of(cache, t["k"], t["where"]), t[name].flatten(0, -2)
        kept = place >= 0
        if "scales" in t:
            rows = (rows / t["scales"][number]).clamp(-MOST, MOST)
        cache.flatten(0, 1)[place[kept]] = rows[kept].unflatten(1, cache.shape[2:])
        written[f"{name}_cache"] = rounded(cache, 3) if "scales" in t else exact(cache)
    return written


def traffic(case: Case) -> tuple[float, float]:
    """Rows that are written, and where; nothing of the caches is read."""
    tokens = case["batch"] * case["new"]
    live = tokens - sum(is_padding(case, token) for token in range(tokens))
    elements = 2.0 * live * case["kv_heads"] * case["head_dim"]
    entries = tokens if is_paged(case) else case["batch"]
    stored = 1 if case.params["quant"] == "fp8" else DTYPES[case.dtype].itemsize
    return elements * DTYPES[case.dtype].itemsize + 8.0 * entries, elements * stored


def append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, where: Tensor, scales: Tensor | None = None) -> None:
    """As one writes it in PyTorch: an `index_put_` a cache, after the tensor that is stored was made."""
    place = places_of(k_cache, k, where)
    for number, (cache, rows) in enumerate(((k_cache, k), (v_cache, v))):
        rows = rows.flatten(0, -2)
        if scales is not None:
            rows = (rows.float() / scales[number]).clamp(-MOST, MOST).to(cache.dtype).view(torch.uint8)
            cache = cache.view(torch.uint8)  # PyTorch indexes no fp8
        cache.flatten(0, 1).index_put_((place,), rows.unflatten(1, cache.shape[2:]))


def flashinfer(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, where: Tensor) -> None:
    """FlashInfer's, which takes sequences of pages: here each page is a sequence, and a place a position in it."""
    from flashinfer.page import append_paged_kv_cache

    pages, page, heads, dim = k_cache.shape
    table = torch.arange(pages + 1, dtype=torch.int32, device=k.device)
    last = torch.full((pages,), page, dtype=torch.int32, device=k.device)
    rows = [tensor.view(-1, heads, dim) for tensor in (k, v)]
    append_paged_kv_cache(
        *rows, (where // page).int(), (where % page).int(), (k_cache, v_cache), table[:-1], table, last
    )


op = Op(
    "kv_append",
    axes={
        "batch": size(4),
        "longest": size(20),
        "new": up_to("longest"),
        "kv_heads": size(4),
        "head_dim": one_of(64, 128, 1, 5),
    },
    params={"cache": ("paged", "contiguous"), "quant": ("none", "fp8"), "padding": ("none", "some")},
    tensors=tensors,
    reference=reference,
    traffic=traffic,
    metric=GBPS,
    strided=("k", "v"),
    odd_shapes=(
        {"batch": 3, "longest": 21, "new": 3, "kv_heads": 3, "head_dim": 64},
        {"batch": 2, "longest": 5, "new": 4, "kv_heads": 1, "head_dim": 5},
    ),
    sizes={
        "small": [
            {"batch": 1, "longest": 1, "new": 1, "kv_heads": 1, "head_dim": 1},
            {"batch": 9, "longest": 40, "new": 1, "kv_heads": 2, "head_dim": 64},
            {"batch": 1, "longest": 16, "new": 9, "kv_heads": 17, "head_dim": 128},
        ],
        "large": [
            {"batch": 16, "longest": 512, "new": 1, "kv_heads": 8, "head_dim": 128},
            {"batch": 2, "longest": 1024, "new": 700, "kv_heads": 8, "head_dim": 128},
        ],
    },
)


def fits(case: Case) -> str | None:
    """The rule of every kernel."""
    padded = case.params["cache"] == "contiguous" and case.params["padding"] == "some"
    return "has padding in a paged cache only (params.cache=paged)" if padded else None


def vectors(case: Case) -> str | None:
    """The rule that rows be of 16-byte pieces."""
    width = case["kv_heads"] * case["head_dim"]
    return f"needs kv_heads * head_dim to be a multiple of 8, got {width}" if width % 8 else None


def heads_of_theirs(case: Case) -> str | None:
    """FlashInfer's kernel is compiled for these head sizes only."""
    sizes = (64, 128, 256, 512)
    return None if case["head_dim"] in sizes else f"takes a head_dim of 64, 128, 256 or 512, got {case['head_dim']}"


ALL = ("float32", "float16", "bfloat16")
NONE, FP8 = {"quant": ("none",)}, {"quant": ("fp8",)}
UNPADDED: dict[str, tuple[str, ...]] = {"padding": ("none",)}
PAGED: dict[str, tuple[str, ...]] = {"cache": ("paged",)}
WIDE: Rule = both(fits, vectors)


op.torch("torch", append, baseline=True, dtypes=ALL, params=UNPADDED, requires=fits)
op.peer("flashinfer", flashinfer, package="flashinfer", params=NONE | UNPADDED | PAGED, requires=heads_of_theirs)
op.cuda("v01_naive.cu", dtypes=ALL, params=NONE, requires=fits)
op.cuda("v01_naive.cu", name="v01_naive_fp8", dtypes=ALL, params=FP8, requires=fits)
op.cuda("v02_vectors.cu", dtypes=ALL, params=NONE, requires=WIDE)
op.cuda("v02_vectors.cu", name="v02_vectors_fp8", dtypes=ALL, params=FP8, requires=WIDE)
op.triton("triton_rows.py", dtypes=ALL, params=NONE, requires=fits)
op.cpp("cpu_rows.cpp", dtypes=ALL, params=NONE, requires=fits)
op.cpp("cpu_rows.cpp", name="cpu_rows_fp8", dtypes=ALL, params=FP8, requires=fits)
