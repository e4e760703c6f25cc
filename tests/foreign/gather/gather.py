"""A paged gather: the entries of a key-value cache, which lie in pages, one sequence after the other in `packed`.

Sequence i has the entries cu_seqlens[i] to cu_seqlens[i + 1] of `packed`; its j-th one is slot j % page_size of page
page_table[i, j // page_size]. What lies behind a length, in the cache and in the table, must not be read."""

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
    exact,
    fixed,
    floats,
    given,
    lengths,
    offsets,
    one_of,
    out,
    page_table,
    size,
)


def lengths_of(case: Case) -> list[int]:
    return lengths(case.params["lengths"], case["sequences"], case["longest"])


def tensors(case: Case) -> list[Spec]:
    counts, page = lengths_of(case), case["page_size"]
    used = [-(-count // page) for count in counts]
    pages = sum(used) + len(used)  # some of them unused

    def poison(made: Tensors) -> torch.Tensor:
        free = torch.ones(pages, page, 1, dtype=torch.bool, device=made["page_table"].device)
        free[places(made["page_table"], made["cu_seqlens"], page, sum(counts))] = False
        return free

    return [
        out("packed", sum(counts), case["dim"]),
        given("page_table", len(used), max(used), dtype="int32", fill=page_table(used, pages, ["cache"])),
        given("cu_seqlens", len(used) + 1, dtype="int32", fill=fixed(offsets(counts))),
        given("cache", pages, page, case["dim"], fill=floats(poison=poison)),
    ]


def places(table: torch.Tensor, starts: torch.Tensor, page: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The page and the slot of each entry."""
    entry = torch.arange(total, device=table.device)
    sequence = torch.searchsorted(starts, entry, right=True) - 1
    position = entry - starts[sequence]
    return table[sequence, position // page].long(), position % page


def reference(case: Case, t: Tensors) -> dict[str, Expected]:
    cache = t["cache"]
    return {"packed": exact(cache[places(t["page_table"], t["cu_seqlens"], cache.shape[1], sum(lengths_of(case)))])}


def traffic(case: Case) -> tuple[float, float]:
    """Of the cache only what is used."""
    entries = float(sum(lengths_of(case)) * case["dim"] * DTYPES[case.dtype].itemsize)
    return entries + sum(4.0 * -(-count // case["page_size"]) + 4 for count in lengths_of(case)), entries


def eager(packed: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """PyTorch's indexing."""
    return cache[places(table, starts, cache.shape[1], packed.shape[0])]


op = Op(
    "foreign_gather",
    axes={"sequences": size(16), "longest": size(300), "page_size": one_of(16, 64), "dim": size(256)},
    params={"lengths": Ragged(examples=("full", "uniform:1", "bimodal:2"))},
    tensors=tensors,
    reference=reference,
    traffic=traffic,
    metric=GBPS,
    odd_shapes=({"sequences": 3, "longest": 77, "page_size": 16, "dim": 5},),
    sizes={"small": [{"sequences": 1, "longest": 1, "page_size": 64, "dim": 1}]},
)

ALL = ("float32", "float16", "bfloat16")
op.torch("torch", eager, baseline=True, returns=(0,), dtypes=ALL)
op.cpp("entries.cpp", dtypes=ALL)
op.cuda("blocks.cu", dtypes=ALL)
