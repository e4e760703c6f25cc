"""`minfer.attention` over keys and values in pages of a cache."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from minfer import attention, kv_append_
from minfer.bench.device import pick
from minfer.functional import best
from tests.functional.test_attention import DIMS, INF, OP, definition, int32, near, random
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")


def in_pages(slots: int, *sequences: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache, in pages in a random order, and the table; NaN in all other slots, and absurd entries behind the last pages."""
    used = [-(-len(x) // slots) for x in sequences]
    order = torch.randperm(sum(used) + 2, generator=torch.Generator().manual_seed(seed)).int()
    cache = sequences[0].new_full((len(order), slots, *sequences[0].shape[1:]), math.nan)
    table = torch.full((len(used), max(used) + 1), 0x3FFFFFFF, dtype=torch.int32)
    for x, row, own in zip(sequences, table, order.split([*used, 2])[:-1], strict=True):
        row[: len(own)] = own
        cache[own.long()] = torch.nn.functional.pad(
            x, (0, 0, 0, 0, 0, len(own) * slots - len(x)), value=math.nan
        ).unflatten(0, (len(own), slots))
    return cache, table


QUERIES, KEYS = [3, 0, 40, 1, 9], [9, 4, 70, 0, 5]
SCALARS = ({}, {"causal": True}, {"causal": True, "window": 5, "softcap": 3.0}, {"scale": 0.3, "window": 9})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("dtype", "slots"),
    mostly_slow(
        itertools.product([torch.float16, torch.bfloat16], [1, 2, 8, 16, 64, 512]),
        lambda pair: pair[0] == torch.float16 or pair[1] == 16,
    ),
)
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_keys_in_pages_are_those_of_a_chunked_prefill(dim, v_dim, slots, dtype, device):
    """Packed and padded: queries that follow cached keys, no queries, no keys, and more queries than keys."""
    place = pick(device)
    q = [random(count, 6, dim, dtype=dtype) for count in QUERIES]
    k, v = ([random(count, 2, of, dtype=dtype) for count in KEYS] for of in (dim, v_dim))
    (k_cache, table), (v_cache, _) = in_pages(slots, *k), in_pages(slots, *v)
    sinks, ends, counts, keys = torch.randn(6), int32([0, *itertools.accumulate(QUERIES)]), int32(QUERIES), int32(KEYS)
    padded = torch.full((5, 41, 6, dim), math.nan, dtype=dtype)
    for row, x in zip(padded, q, strict=True):
        row[: len(x)] = x
    tensors = (torch.cat(q), padded, k_cache, v_cache, table, sinks, ends, counts, keys)
    packed, padded, k_cache, v_cache, table, on_device, ends, counts, keys = (x.to(place) for x in tensors)
    for scalars in SCALARS:
        about = {"page_table": table, "return_lse": True, **scalars}
        out, lse = (x.cpu() for x in attention(packed, k_cache, v_cache, cu_seqlens=ends, lengths=keys, **about))
        wide, wide_lse = (x.cpu() for x in attention(padded, k_cache, v_cache, lengths=(counts, keys), **about))
        sunk = attention(packed, k_cache, v_cache, cu_seqlens=ends, lengths=keys, sinks=on_device, **about)[0].cpu()
        assert out.shape == (53, 6, v_dim) and lse.shape == (6, 53) and wide_lse.shape == (5, 6, 41)
        for i, (rows, end) in enumerate(zip(q, itertools.accumulate(QUERIES), strict=True)):
            some, wanted, wanted_lse = slice(end - len(rows), end), *definition(rows, k[i], v[i], **scalars)
            near(out[some], wanted, dtype)
            near(lse[:, some], wanted_lse, torch.float32)
            near(sunk[some], wanted * torch.sigmoid(wanted_lse - sinks[:, None]).t()[..., None], dtype)
            near(wide[i, : len(rows)], wanted, dtype)
            near(wide_lse[i, :, : len(rows)], wanted_lse, torch.float32)
            assert not wide[i, len(rows) :].any() and bool((wide_lse[i, :, len(rows) :] == -INF).all())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives(device):
    """Each chunk is written to the cache by `kv_append_`, and sees what lies there."""
    place, slots, table = pick(device), 16, int32([[5, 0, 3, 1, 6, 2, 4, 99]])
    q, k, v = (random(100, heads, 64).to(place) for heads in (4, 2, 2))
    k_cache, v_cache = (torch.full((7, slots, 2, 64), math.nan, dtype=torch.float16, device=place) for _ in range(2))
    whole = attention(q[None], k[None], v[None], causal=True)[0].cpu()
    for begin, end in itertools.pairwise([0, 37, 38, 96, 100]):
        some, token = slice(begin, end), torch.arange(begin, end)
        kv_append_(
            k_cache, v_cache, k[some], v[some], (table[0, token // slots] * slots + token % slots).long().to(place)
        )
        of_q, keys = int32([0, end - begin]).to(place), int32([end]).to(place)
        about = {"causal": True, "cu_seqlens": of_q, "lengths": keys, "page_table": table.to(place)}
        near(attention(q[some], k_cache, v_cache, **about).cpu(), whole[some].double())


@pytest.mark.parametrize(
    ("capability", "page", "seq_q", "seq_kv", "dim", "kernel"),
    [
        ((9, 0), "16", 2048, 16384, 128, "v15_gathered"),
        ((9, 0), "16", 2048, 131072, 128, "v15_gathered"),
        ((9, 0), "16", 2048, 131073, 128, "v10_paged_boxes"),  # the copy would take more than 512 MiB
        ((9, 0), "16", 128, 16384, 128, "v18_paged_parts"),  # 32 tiles for 132 multiprocessors
        ((9, 0), "64", 16, 16384, 128, "v18_paged_parts"),
        ((9, 0), "64", 16, 64, 128, "v11_paged_short"),  # few queries: a tile has those of several heads
        ((9, 0), "16", 512, 512, 64, "v11_paged_short"),
        ((9, 0), "16", 16, 512, 96, "v09_paged"),  # v11 and v18 take no heads of 96
        ((9, 0), "16", 512, 512, 96, "v10_paged_boxes"),
        ((9, 0), "16", 2048, 16384, 256, "v09_paged"),
        ((9, 0), "1", 2048, 16384, 128, "v15_gathered"),
        ((9, 0), "1", 2048, 131073, 128, "v09_paged"),  # TMA's boxes have at least 8 keys
        ((8, 9), "16", 2048, 16384, 128, "v09_paged"),
        (None, "16", 20, 30, 128, "cpu_blocked_paged"),
    ],
)
def test_which_kernel_reads_pages(monkeypatch, capability, page, seq_q, seq_kv, dim, kernel):
    monkeypatch.setattr(best, "table", lambda: {})  # rows may decide otherwise
    shape = dict(zip(OP.axes, (1, seq_q, seq_kv, 32, 8, dim), strict=False))
    params = {"layout": "packed", "lengths": "halving", "lse": "no", "page": page}
    assert best.best("prefill_attention", "bfloat16", params, shape, capability, "").kernel == kernel


def test_caches_of_both_are_read_in_place_as_parts_of_one_tensor():
    """(pages, 2, slots, kv_heads, dim), as some engines have it."""
    k, v = random(50, 2, 64), random(50, 2, 64)
    both = torch.stack([in_pages(16, x)[0] for x in (k, v)], 1)
    table, q = in_pages(16, k)[1], random(1, 9, 4, 64)
    found = attention(q, both[:, 0], both[:, 1], lengths=(int32([9]), int32([50])), page_table=table, causal=True)
    near(found[0], definition(q[0], k, v, True)[0])


def test_lengths_and_pages_that_contradict_the_cache_read_nothing_outside():
    q, cache, table = random(2, 5, 2, 64), random(3, 16, 2, 64), int32([[7, -1], [2, 2**31 - 1]])
    for keys in ([2**31 - 1, -7], [32, 20]):
        found = attention(q, cache, cache, lengths=(int32([5, 5]), int32(keys)), page_table=table)
        assert bool(found.isfinite().all())
    ends = int32([-5, 2**30, 3])
    attention(q.flatten(0, 1), cache, cache, cu_seqlens=ends, lengths=int32([9, 2**30]), page_table=table)
    about = {"lengths": (int32([5, 5]), int32([9, 9])), "return_lse": True}
    for pages, columns in ((cache[:0], 2), (cache, 0)):
        out, lse = attention(q, pages, pages, page_table=table[:, :columns], **about)
        assert not out.any() and bool((lse == -INF).all())


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 16, 64])
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_a_captured_graph_over_pages_stays_right_when_lengths_change_in_place(dim, v_dim, slots):
    device = pick("cuda")
    q, k, v = random(300, 6, dim), random(900, 2, dim), random(900, 2, v_dim)
    (k_cache, table), (v_cache, _) = in_pages(slots, k, k), in_pages(slots, v, v)
    on_gpu = [x.to(device) for x in (q, k_cache, v_cache)]
    ends, keys = (int32(x).to(device) for x in ([0, 300, 300], [900, 900]))
    about = {"causal": True, "cu_seqlens": ends, "lengths": keys, "page_table": table.to(device)}
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        attention(*on_gpu, **about)  # compiles
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = attention(*on_gpu, **about)
        for end, counts in ((300, [900, 0]), (1, [700, 299]), (128, [129, 900]), (0, [5, 513])):
            ends[1], keys[:] = end, int32(counts).to(device)
            graph.replay()
            found = captured.cpu()
            for some, count in ((slice(end), counts[0]), (slice(end, 300), counts[1])):
                near(found[some], definition(q[some], k[:count], v[:count], True)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 8, 16, 64, 256])
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_pages_give_what_keys_side_by_side_give_at_sizes_of_a_gpu(dim, v_dim, slots):
    device, counts, keys = pick("cuda"), [1, 700, 129, 2000], [3000, 700, 1025, 2999]
    q = random(sum(counts), 8, dim).to(device)
    k, v = (random(sum(keys), 2, of) for of in (dim, v_dim))
    (k_cache, table), (v_cache, _) = (in_pages(slots, *x.split(keys)) for x in (k, v))
    ends, ends_kv = (int32([0, *itertools.accumulate(x)]).to(device) for x in (counts, keys))
    about = {"cu_seqlens": ends, "lengths": int32(keys).to(device), "page_table": table.to(device)}
    for scalars in ({"causal": True}, {}, {"causal": True, "window": 300}, {"causal": True, "softcap": 20.0}):
        wanted = attention(q, k.to(device), v.to(device), cu_seqlens=(ends, ends_kv), **scalars)
        found = attention(q, k_cache.to(device), v_cache.to(device), **about, **scalars)
        near(found.cpu(), wanted.cpu().double())
