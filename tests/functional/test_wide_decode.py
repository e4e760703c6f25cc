"""`minfer.decode_attention` with pages of any power of two, 16 new tokens and trees: on a CPU, emulated and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from minfer import decode_attention, ops
from minfer.bench.device import pick
from minfer.build import toolchain
from tests.emulator import Emulated, KernelError, compiled
from tests.emulator.mistakes import WIDE
from tests.functional.test_decode_attention import paged
from tests.functional.test_scored_decode import hide

pytestmark = pytest.mark.usefixtures("one_thread")
OP = ops.get("decode_attention")
COUNTS = [0, 1, 5, 15, 16, 17, 64, 129, 33]
PAGES = [1, 2, 4, 8, 16, 32, 128]
Shape = tuple[int, int, int, int]  # new, heads, kv_heads, head_dim
NOTHING = torch.empty(0)
OF_96 = ("part_page",)  # mistakes in what is done with rows of 96 columns alone


def draw_tree(batch: int, new: int) -> torch.Tensor:
    """Each token but the first has a parent before it; it sees its ancestors and itself."""
    found = torch.eye(new, dtype=torch.bool).repeat(batch, 1, 1)
    for tree in found:
        for token in range(1, new):
            tree[token] |= tree[int(torch.randint(token, ()))]
    return found


def pack(mask: torch.Tensor) -> torch.Tensor:
    return (mask.long() << torch.arange(mask.shape[-1])).sum(-1).to(torch.int32)


def definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """One sequence in fp64, a query at a time; queries before its first key give 0."""
    new, keys, group = len(q), len(k), q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    mask = torch.ones(new, new).tril().bool() if mask is None else mask
    position = torch.arange(keys)
    found = q.new_zeros(*q.shape[:2], v.shape[2])
    for i in range(max(0, new - keys), new):
        own = keys - new + i
        seen = position < keys - new
        seen[max(0, keys - new) :] = mask[i, max(0, new - keys) :]
        if window := options.get("window"):
            seen &= position > own - window
        scores = torch.einsum("hd,khd->hk", q[i], k[seen]) * q.shape[2] ** -0.5
        if cap := options.get("softcap"):
            scores = cap * (scores / cap).tanh()
        if (sinks := options.get("sinks")) is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), 1)
        weights = scores.softmax(1)[:, : int(seen.sum())]
        found[i] = torch.einsum("hk,khd->hd", weights, v[seen])
    return found


def check(out: torch.Tensor, q: torch.Tensor, rows: Sequence[Any], masks: Any = None, **options: Any) -> None:
    for i, (found, x, (k, v)) in enumerate(zip(out, q, rows, strict=True)):
        wanted = definition(x, k, v, None if masks is None else masks[i], **options)
        torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("new", "window"), [(1, None), (3, 7)])
def test_pages_of_any_power_of_two(page: int, new: int, window: int | None) -> None:
    q, rows, caches, table = paged(COUNTS, new, 6, 2, 64, page)
    if window:
        hide(caches, table, COUNTS, new, window)
    lengths = torch.tensor(COUNTS, dtype=torch.int32)
    check(decode_attention(q, *caches, lengths, page_table=table, window=window), q, rows, window=window)
    if not window:
        decode_attention(q, *caches, lengths, page_table=table, check_pages=True)


@pytest.mark.parametrize("new", [9, 16])
@pytest.mark.parametrize("page", [2, 64])
def test_up_to_16_new_tokens_and_trees_of_them(new: int, page: int) -> None:
    q, rows, caches, table = paged(COUNTS, new, 6, 2, 64, page)
    lengths, mask = torch.tensor(COUNTS, dtype=torch.int32), draw_tree(len(COUNTS), new)
    check(decode_attention(q, *caches, lengths, page_table=table), q, rows)
    options = {"softcap": 2.0, "sinks": torch.linspace(-4, 9, 6)}
    for more in ({}, options):
        found = decode_attention(q, *caches, lengths, page_table=table, mask=mask, **more)
        check(found, q, rows, mask, **more)
        assert torch.equal(found, decode_attention(q, *caches, lengths, page_table=table, mask=pack(mask), **more))
    causal = torch.ones(new, new).tril().bool().expand(len(COUNTS), new, new)
    out = decode_attention(q, *caches, lengths, page_table=table, mask=causal)
    torch.testing.assert_close(out, decode_attention(q, *caches, lengths, page_table=table))


def test_a_tree_of_a_contiguous_cache_and_of_fp8() -> None:
    q, k, v = torch.randn(2, 5, 4, 64).half(), torch.randn(2, 20, 2, 64), torch.randn(2, 20, 2, 64)
    counts, mask, scales = [20, 7], draw_tree(2, 5), torch.tensor([0.5, 2.0])
    lengths = torch.tensor(counts, dtype=torch.int32)
    rows = [[x[i, :n].half() for x in (k, v)] for i, n in enumerate(counts)]
    check(decode_attention(q, k.half(), v.half(), lengths, mask=mask), q, rows, mask)
    k8, v8 = (x.to(torch.float8_e4m3fn) for x in (k, v))
    rows = [[k8[i, :n].float() * 0.5, v8[i, :n].float() * 2] for i, n in enumerate(counts)]
    check(decode_attention(q, k8, v8, lengths, scales=scales, mask=mask), q, rows, mask)


def test_a_mask_goes_through_torch_compile() -> None:
    q, k = torch.randn(2, 3, 2, 64).half(), torch.randn(2, 30, 1, 64).half()
    lengths, mask = torch.tensor([30, 9], dtype=torch.int32), draw_tree(2, 3)
    whole = torch.compile(lambda *x: decode_attention(*x[:4], mask=x[4]), backend="aot_eager", fullgraph=True)
    assert torch.equal(whole(q, k, k, lengths, mask), decode_attention(q, k, k, lengths, mask=mask))


# More tokens than a tile has rows, odd groups, each head_dim, and several parts of a sequence.
EMULATED: list[tuple[list[int], Shape, int]] = [
    (COUNTS, (1, 6, 2, 64), 1),
    ([300, 0, 41], (3, 6, 1, 128), 4),
    ([300, 7], (16, 3, 1, 128), 8),
    ([70, 16], (16, 5, 1, 64), 2),
    ([90], (10, 4, 2, 256), 64),
    ([90, 33, 0], (4, 6, 2, 96), 4),
    ([170, 17], (9, 2, 1, 192), 2),
]


def run(
    kernel: Callable[..., None], counts: list[int], shape: Shape, page: int, tree: torch.Tensor | bool, **options: Any
) -> None:
    """Fails if the kernel's result is not the definition's. tree: the mask, or whether one is drawn."""
    q, rows, caches, table = paged(counts, *shape, page)
    if window := options.get("window"):
        hide(caches, table, counts, shape[0], window)
    mask = tree if isinstance(tree, torch.Tensor) else draw_tree(len(counts), shape[0]) if tree else None
    for packed in (False,) if mask is None else (False, True):
        out, lengths = q.new_full((*q.shape[:3], caches[1].shape[3]), math.nan), torch.tensor(counts, dtype=torch.int32)
        given = NOTHING if mask is None else pack(mask) if packed else mask
        kernel(out, q, lengths, table, *caches, NOTHING, NOTHING, given, **options)
        check(out, q, rows, mask, **options)


@pytest.mark.slow
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
def test_the_kernel_of_a_gpu_is_the_definition_when_emulated_and_mistakes_are_seen(tmp_path: Any) -> None:
    kernel = OP.kernels["v05_scored"]
    names = dict(enumerate(WIDE[1].items(), 1))
    library = compiled(kernel, tmp_path, {i: {name: edit} for i, (name, edit) in names.items()})
    entry = replace(kernel, name="v05_scored_scored")
    for counts, shape, page in EMULATED:
        for tree in (False, True):
            run(Emulated(entry, library), counts, shape, page, tree)
    run(Emulated(entry, library), COUNTS, (3, 6, 2, 64), 2, False, window=7)
    every = torch.ones(2, 5, 5, dtype=torch.bool)  # a token at a negative position sees nothing even so
    run(Emulated(entry, library), [3, 7], (5, 4, 2, 64), 16, every)
    for mistake, (name, _) in names.items():
        broken = Emulated(entry, library, mistake)
        with pytest.raises((AssertionError, KernelError)):
            for _ in range(12):  # in several orders of warps
                if name == "before_first":
                    run(broken, [3, 7], (5, 4, 2, 64), 16, every)
                else:
                    run(broken, [60, 3], (5, 4, 2, 96 if name in OF_96 else 64), 4, True)


@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_on_a_gpu_and_in_a_graph_whose_lengths_and_trees_change(page: int, dtype: torch.dtype) -> None:
    device, counts = pick("cuda"), [1300, 17, 0, 64, 300, 1, 129, 700]
    shapes: list[Shape] = [
        (1, 8, 2, 128),
        (3, 6, 2, 64),
        (16, 16, 4, 128),
        (16, 5, 1, 64),
        (7, 6, 2, 256),
        (3, 6, 2, 96),
        (2, 16, 1, 192),
    ]
    tolerance = 2e-3 if dtype == torch.float16 else 1.6e-2
    for new, heads, kv_heads, dim in shapes:
        for tree in (False, True):
            made = []
            for each in (counts, counts[::-1]):
                q, rows, caches, table = paged(each, new, heads, kv_heads, dim, page)
                rows = [[x.to(dtype) for x in both] for both in rows]
                tensors = [x.to(dtype) for x in (q, *caches)] + [torch.tensor(each, dtype=torch.int32), table]
                mask = draw_tree(len(each), new) if tree else None
                made.append((tensors, rows, mask))
            static = [x.to(device) for x in (*made[0][0], made[0][2]) if x is not None]
            static_mask = static[5] if tree else None
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                q, k, v, lengths, table, *_ = static
                decode_attention(q, k, v, lengths, page_table=table, mask=static_mask)  # compiles
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    captured = decode_attention(q, k, v, lengths, page_table=table, mask=static_mask)
                for tensors, rows, mask in made:
                    for to, of in zip(static, [*tensors, *([mask] if tree else [])], strict=True):
                        to.copy_(of)
                    graph.replay()
                    found = captured.cpu()
                    for i, (got, x, (a, b)) in enumerate(zip(found, tensors[0], rows, strict=True)):
                        wanted = definition(x, a, b, None if mask is None else mask[i])
                        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
                    again = decode_attention(q, k, v, lengths, page_table=table, mask=static_mask)
                    assert torch.equal(again.cpu(), found)
