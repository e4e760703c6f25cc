"""`minfer.attention` over keys and values in fp8, and what `prefill_attention` states of them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from minfer import attention, cascade_attention, kv_append_, ops
from minfer.bench.device import pick
from minfer.bench.errors import run_reference
from minfer.bench.operands import Operands
from minfer.bench.verify import WrongResult, verify
from minfer.functional import best
from minfer.ops.prefill_attention import SCALES, baselines
from tests.functional.test_attention import CPU, DIMS, OP, case_of, definition, int32, near, only, random
from tests.functional.test_attention_pages import KEYS, QUERIES, SCALARS, in_pages
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")
FP8 = torch.float8_e4m3fn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FACTORS = torch.tensor([0.37, 2.3])  # like those of real caches, no powers of two


def quantised(x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values in fp8, and what they stand for, in fp64."""
    stored = (x.float() / factor).to(FP8)
    return stored, stored.double() * factor.double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dim", "v_dim", "slots", "dtype"),
    mostly_slow(
        [
            (dim, v_dim, slots, dtype)
            for (dim, v_dim), slots, dtype in itertools.product(DIMS, (1, 16, 512), (torch.float16, torch.bfloat16))
        ],
        {(64, 64, 16, torch.float16), (192, 128, 1, torch.bfloat16)}.__contains__,
    ),
)
def test_keys_in_fp8_are_those_of_a_chunked_prefill(dim, v_dim, slots, dtype, device):
    """Packed, padded and side by side: queries that follow cached keys, no queries, no keys, and more queries than keys."""
    place = pick(device)
    q = [random(count, 6, dim, dtype=dtype) for count in QUERIES]
    of_k, of_v = (
        [quantised(random(count, 2, of), factor) for count in KEYS]
        for of, factor in zip((dim, v_dim), FACTORS, strict=True)
    )
    (k_cache, table), (v_cache, _) = (in_pages(slots, *(stored for stored, _ in of)) for of in (of_k, of_v))
    sinks, ends, counts, keys = torch.randn(6), int32([0, *itertools.accumulate(QUERIES)]), int32(QUERIES), int32(KEYS)
    padded = torch.full((5, 41, 6, dim), math.nan, dtype=dtype)
    for row, x in zip(padded, q, strict=True):
        row[: len(x)] = x
    side = [torch.cat([stored for stored, _ in of]) for of in (of_k, of_v)]
    tensors = (torch.cat(q), padded, k_cache, v_cache, *side, table, sinks, ends, counts, keys)
    packed, padded, k_cache, v_cache, k, v, table, on_device, ends, counts, keys = (x.to(place) for x in tensors)
    of_keys = int32([0, *itertools.accumulate(KEYS)]).to(place)
    for scalars in SCALARS:
        about = {"scales": FACTORS.to(place), "return_lse": True, **scalars}
        paged = {"page_table": table, **about}
        out, lse = (x.cpu() for x in attention(packed, k_cache, v_cache, cu_seqlens=ends, lengths=keys, **paged))
        wide, wide_lse = (x.cpu() for x in attention(padded, k_cache, v_cache, lengths=(counts, keys), **paged))
        beside = attention(packed, k, v, cu_seqlens=(ends, of_keys), **about)[0].cpu()
        sunk = attention(packed, k_cache, v_cache, cu_seqlens=ends, lengths=keys, sinks=on_device, **paged)[0].cpu()
        for i, (rows, end) in enumerate(zip(q, itertools.accumulate(QUERIES), strict=True)):
            some = slice(end - len(rows), end)
            wanted, wanted_lse = definition(rows, of_k[i][1], of_v[i][1], **scalars)
            for found in (out[some], wide[i, : len(rows)], beside[some]):
                near(found, wanted, dtype)
            near(lse[:, some], wanted_lse, torch.float32)
            near(wide_lse[i, :, : len(rows)], wanted_lse, torch.float32)
            near(sunk[some], wanted * torch.sigmoid(wanted_lse - sinks[:, None]).t()[..., None], dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_follow_a_cache_that_kv_append_writes_in_fp8(device):
    place, slots, table = pick(device), 16, int32([[5, 0, 3, 1, 6, 2, 4, 99]])
    q, k, v = (random(100, heads, 64) for heads in (4, 2, 2))
    k_cache, v_cache = (torch.full((7, slots, 2, 64), math.nan).to(FP8).to(place) for _ in range(2))
    wanted = definition(q, quantised(k, FACTORS[0])[1], quantised(v, FACTORS[1])[1], True)[0]
    q, k, v, scales = (x.to(place) for x in (q, k, v, FACTORS))
    for begin, end in itertools.pairwise([0, 37, 38, 96, 100]):
        some, token = slice(begin, end), torch.arange(begin, end)
        where = (table[0, token // slots] * slots + token % slots).long().to(place)
        kv_append_(k_cache, v_cache, k[some], v[some], where, scales=scales)
        of_q, keys = int32([0, end - begin]).to(place), int32([end]).to(place)
        about = {"causal": True, "cu_seqlens": of_q, "lengths": keys, "page_table": table.to(place), "scales": scales}
        near(attention(q[some], k_cache, v_cache, **about).cpu(), wanted[some])


@pytest.mark.parametrize("page", ["none", "16"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_reference_multiplies_with_the_scales(layout, page):
    """A case in fp8 is the case of the same numbers in fp32, times the scales."""
    case = case_of((3, 20, 30, 4, 2, 64), layout=layout, lengths="gaps:1", lse="yes", page=page, quant="fp8")
    tensors = Operands(OP, case, 3, "uniform", CPU).tensors
    assert tensors["k"].dtype == tensors["v"].dtype == FP8 and tensors["scales"].tolist() == [*SCALES]
    wide = {name: x.float() if x.dtype == FP8 else x for name, x in tensors.items()}
    wide |= {name: wide[name] * scale for name, scale in zip("kv", SCALES, strict=True)}
    plain = case_of((3, 20, 30, 4, 2, 64), layout=layout, lengths="gaps:1", lse="yes", page=page)
    found, wanted = run_reference(OP, case, tensors), run_reference(OP, plain, wide)
    for name in ("out", "lse"):
        torch.testing.assert_close(found[name].value, wanted[name].value)


@pytest.mark.parametrize("how", ["nothing", "keys not scaled", "values not scaled", "scales exchanged"])
def test_a_wrong_kernel_is_seen(how):
    case = case_of((1, 40, 60, 1, 1, 64), quant="fp8")
    kernel = ops.Kernel(OP.name, "wrong", "torch", OP.source, params={"call": ("causal",)}, requires=only(case))

    def wrong(*tensors, **scalars):
        of = {"keys not scaled": (1.0, SCALES[1]), "values not scaled": (SCALES[0], 1.0), "nothing": SCALES}
        scales = torch.tensor(of.get(how, SCALES[::-1]))
        baselines.of_caches(baselines.eager, torch.float32)(*tensors[:-1], scales, **scalars)

    if how == "nothing":
        verify(OP, case, kernel, wrong, CPU, None, seed=1)
        return
    with pytest.raises(WrongResult):
        verify(OP, case, kernel, wrong, CPU, None, seed=1)


def test_a_case_names_fp8_only_where_keys_are_in_fp8():
    """A case in bfloat16 keeps the key that its rows had before the op took fp8. In fp8, k and v count half the bytes."""
    shape = (1, 4, 32, 2, 1, 64)
    assert "quant" not in case_of(shape).key and case_of(shape, quant="none") == case_of(shape)
    assert case_of(shape, page="16", quant="fp8").params["quant"] == "fp8"
    assert OP.traffic_of(case_of(shape))[0] - OP.traffic_of(case_of(shape, quant="fp8"))[0] == 2 * 32 * 64
    for name, kernel in OP.kernels.items():
        if kernel.backend in ("cuda", "triton", "cpp"):
            assert (kernel.takes(case_of(shape, quant="fp8")) is None) == ("fp8" in name)
            assert "fp8" not in name or kernel.takes(case_of(shape)) == "supports quant=fp8, not none"


@pytest.mark.parametrize(
    ("capability", "sizes", "kernel"),
    [
        ((9, 0), (1, 2048, 16384, 32, 8, 128), "v16_fp8_gathered"),
        ((9, 0), (1, 64, 32768, 16, 2, 192, 128), "v16_fp8_gathered"),
        ((9, 0), (1, 2048, 131072, 32, 8, 128), "v16_fp8_gathered"),
        ((9, 0), (1, 2048, 131073, 32, 8, 128), "v12_fp8"),  # the copy would take more than 512 MiB
        ((9, 0), (8, 16, 512, 32, 8, 64), "v16_fp8_gathered"),
        ((9, 0), (64, 16, 64, 32, 8, 64), "v12_fp8"),  # the copy takes longer than it saves
        ((9, 0), (1, 20, 30, 4, 1, 256), "v12_fp8"),
        ((9, 0), (1, 2048, 16384, 32, 8, 256), "v12_fp8"),
        *((place, sizes, kernel) for place, kernel in (((8, 0), "v12_fp8"), (None, "cpu_naive_fp8"))
          for sizes in ((1, 2048, 16384, 32, 8, 128), (8, 16, 512, 32, 8, 64), (1, 20, 30, 4, 1, 256))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("page", ["none", "1", "16"])
def test_which_kernel_reads_fp8(capability, kernel, page, sizes):
    shape = dict(zip(OP.axes, sizes, strict=False))
    params = {"layout": "packed", "lengths": "halving", "lse": "no", "page": page, "quant": "fp8"}
    assert best.best("prefill_attention", "bfloat16", params, shape, capability, "").kernel == kernel


def test_it_is_an_op_like_pytorchs_own():
    q, scales, two = random(2, 5, 4, 64), torch.tensor([0.5, 2.0]), int32([5, 3])
    k, v = random(2, 8, 2, 64).to(FP8), random(2, 8, 2, 64).to(FP8)
    for table in (None, torch.zeros(2, 1, dtype=torch.int32)):
        arguments = (q, k, v, two, two, torch.zeros(4), table, scales, True, 0, 0.0, 0.0, True)
        # The other tests of opcheck multiply inputs, which PyTorch does not do in fp8.
        torch.library.opcheck(torch.ops.minfer.attention.default, arguments, test_utils="test_faketensor")
    compiled = torch.compile(lambda *x: attention(*x, causal=True, scales=scales), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v, causal=True, scales=scales))


def test_no_keys_and_no_pages_give_zeros():
    q, cache, scales = random(2, 5, 2, 64), random(3, 16, 2, 64).to(FP8), torch.ones(2)
    about = {"lengths": (int32([5, 5]), int32([9, 9])), "scales": scales, "return_lse": True}
    for pages, columns in ((cache[:0], 2), (cache, 0)):
        out, lse = attention(q, pages, pages, page_table=torch.zeros(2, columns, dtype=torch.int32), **about)
        assert not out.any() and bool((lse == -math.inf).all())


def test_mistakes_are_a_sentence_each():
    q, k, k8 = random(2, 5, 4, 64), random(2, 8, 2, 64), random(2, 8, 2, 64).to(FP8)
    scales, fp8 = torch.ones(2), "float8_e4m3fn and the shape"
    for arguments, keywords, said in (
        ((q, k8, k8), {}, "scales beside k and v of float8_e4m3fn, got None"),
        ((q, k, k), {"scales": scales}, rf"k of {fp8} \(2, seq_kv, kv_heads, 64\), got torch.float16, .*"),
        ((q, k8, k), {"scales": scales}, rf"v of {fp8} \(2, 8, 2, 64\), got torch.float16, .*"),
        ((q, k8, k8), {"scales": scales[:1]}, r"scales of float32 and the shape \(2,\), got torch.float32, \(1,\)"),
        ((q, k8, k8), {"scales": scales.half()}, r"scales of float32 and the shape \(2,\), got torch.float16, \(2,\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^minfer.attention takes {said}$"):
            attention(*arguments, **keywords)
    with pytest.raises(TypeError, match=r"^minfer\.attention takes a tensor or None as scales, got float$"):
        attention(q, k8, k8, scales=0.5)
    ends, keys, table = int32([0, 2, 5]), int32([8, 8]), int32([[0], [1]])
    said = "^minfer.cascade_attention takes k of the dtype of q, torch.float16, got torch.float8_e4m3fn$"
    with pytest.raises(ValueError, match=said):
        cascade_attention(q[0], k8, k8, 8, cu_seqlens=ends, lengths=keys, page_table=table)
    with pytest.raises(ValueError, match=said):
        cascade_attention(q, k8, k8, k[0], k[0])


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 16, 64])
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_a_captured_graph_stays_right_when_lengths_and_scales_change_in_place(dim, v_dim, slots):
    device = pick("cuda")
    q, (k, k_wide), (v, v_wide) = (
        random(300, 6, dim),
        *(quantised(random(900, 2, of), FACTORS[0]) for of in (dim, v_dim)),
    )
    (k_cache, table), (v_cache, _) = in_pages(slots, k, k), in_pages(slots, v, v)
    on_gpu = [x.to(device) for x in (q, k_cache, v_cache)]
    ends, keys, scales = (x.to(device) for x in (int32([0, 300, 300]), int32([900, 900]), torch.ones(2)))
    about = {"causal": True, "cu_seqlens": ends, "lengths": keys, "page_table": table.to(device), "scales": scales}
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        attention(*on_gpu, **about)  # compiles
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = attention(*on_gpu, **about)
        for end, counts, factor in ((300, [900, 0], 1.0), (1, [700, 299], 0.5), (128, [129, 900], 2.0)):
            ends[1], keys[:], scales[:] = end, int32(counts).to(device), factor * FACTORS[0].item()
            graph.replay()
            found = captured.cpu()
            for some, count in ((slice(end), counts[0]), (slice(end, 300), counts[1])):
                near(found[some], definition(q[some], factor * k_wide[:count], factor * v_wide[:count], True)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 8, 16, 256])
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_fp8_gives_what_the_same_numbers_in_half_precision_give_at_sizes_of_a_gpu(dim, v_dim, slots):
    device, counts, keys = pick("cuda"), [1, 700, 129, 2000], [3000, 700, 1025, 2999]
    q, scales = random(sum(counts), 8, dim).to(device), torch.tensor([0.5, 2.0], device=device)
    k, v = (random(sum(keys), 2, of).to(FP8) for of in (dim, v_dim))
    (k_cache, table), (v_cache, _) = (in_pages(slots, *x.split(keys)) for x in (k, v))
    wide = [x.half().to(device) * scale for x, scale in zip((k, v), scales, strict=True)]
    ends, ends_kv = (int32([0, *itertools.accumulate(x)]).to(device) for x in (counts, keys))
    paged = {"cu_seqlens": ends, "lengths": int32(keys).to(device), "page_table": table.to(device)}
    side_by_side = {"cu_seqlens": (ends, ends_kv)}
    for scalars in ({"causal": True}, {}, {"causal": True, "window": 300}, {"causal": True, "softcap": 20.0}):
        wanted = attention(q, *wide, **side_by_side, **scalars).cpu().double()
        for caches, about in (((k_cache, v_cache), paged), ((k, v), side_by_side)):
            near(attention(q, *(x.to(device) for x in caches), scales=scales, **about, **scalars).cpu(), wanted)
