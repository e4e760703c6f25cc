"""`prefill_attention`: what the op states, its wrong kernels, and `minfer.attention`, an op like PyTorch's own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from minfer import attention, build, ops
from minfer.bench.device import pick
from minfer.bench.errors import compare_output, run_reference
from minfer.bench.operands import Operands
from minfer.bench.verify import WrongResult, verify
from minfer.ops.axes import DISTRIBUTIONS, Ragged, lengths
from minfer.ops.prefill_attention import baselines
from tests.sizes import named

pytestmark = pytest.mark.usefixtures("one_thread")
OP = ops.get("prefill_attention")
CPU = torch.device("cpu")
INF = math.inf


def case_of(shape: tuple[int, ...], call: str = "causal", dtype: str = "float16", **params: str) -> ops.Case:
    more = {"call": call} if call != "causal" else {}
    return OP.case("torch_eager", dtype, named(OP, [shape])[0], params | more)


def seen(queries: int, keys: int, causal: bool, window: int) -> torch.Tensor:
    """The mask by its definition, pair by pair."""
    rows = []
    for i in range(queries):
        p = i + keys - queries
        rows.append([(not causal or j <= p) and (not window or abs(p - j) < window) for j in range(keys)])
    return torch.tensor(rows, dtype=torch.bool).view(queries, keys)


def definition(q, k, v, causal=False, window=0, softcap=0.0, scale=None):
    """One sequence, (tokens, heads, dim), in fp64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * (scale or q.shape[2] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen(len(q), len(k), causal, window), -INF)
    p = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("hij,jhd->ihd", p, v), scores.logsumexp(-1)


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def near(found, wanted, dtype=torch.float16):
    atol = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=atol, atol=atol)


@pytest.mark.parametrize("call", OP.calls)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (3, 41), (30, 9), (50, 50)])
def test_the_count_of_pairs_is_that_of_the_definition(queries, keys, call):
    case = case_of((2, queries, keys, 3, 1, 64), call)
    scalars = OP.call(case)
    pairs = int(seen(queries, keys, scalars["causal"], scalars["window"]).sum())
    assert OP.flops(case) == 4 * 2 * 3 * 64 * pairs


def test_values_of_128_beside_keys_of_192_take_their_part_of_work_and_bytes():
    case = case_of((1, 4, 4, 2, 1, 192, 128), "full")
    assert case.shape["v_dim"] == 128 and case.shape_name.endswith("head_dim=192,v_dim=128")
    assert OP.flops(case) == 2 * 4 * 4 * 2 * (192 + 128)
    assert OP.traffic_of(case) == (2 * 4 * (2 * 192 + 192 + 128), 2 * 4 * 2 * 128)
    assert [spec.shape[-1] for spec in OP.specs(case)[:5]] == [128, 0, 192, 192, 128]


def test_a_case_names_the_length_of_values_only_where_it_is_another():
    for dim in (64, 192):
        assert case_of((1, 4, 4, 2, 1, dim, dim)) == case_of((1, 4, 4, 2, 1, dim))
    assert OP.wrong_shape(dict(case_of((1, 4, 4, 2, 1, 128)).shape)) is None
    wrong = OP.wrong_shape(dict(zip(OP.axes, (1, 4, 4, 2, 1, 128, 96), strict=True)))
    assert wrong == "v_dim=96 must be head_dim=128, or 128 where head_dim=192"


def test_bytes_are_those_of_keys_that_are_seen():
    token = 64 * 2
    read, written = OP.traffic_of(case_of((1, 5, 200, 4, 2, 64), "narrow"))  # the last 5 of 200, each with 20 keys
    assert (read, written) == (token * (5 * 4 + 2 * 24 * 2), token * 5 * 4)
    read, written = OP.traffic_of(case_of((3, 8, 8, 1, 1, 64), layout="padded", lengths="halving", lse="yes"))
    assert (read, written) == (token * 3 * (8 + 4 + 2), 3 * 8 * (token + 4))


def test_lengths_halve_and_have_gaps():
    assert lengths("halving", 9, 8192) == [8192, 4096, 2048, 1024, 512, 256, 128, 64, 8192]
    assert [length == 0 for length in lengths("gaps:1", 6, 100)] == [False, True, False, False, True, False]
    assert Ragged().check("halving") is None and Ragged().check("gaps:3") is None
    assert "takes full, halving, one_long, uniform:SEED" in (Ragged().check("odd") or "")
    assert set(DISTRIBUTIONS) >= {"full", "halving", "uniform", "gaps"}


@pytest.mark.parametrize("call", OP.calls)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_reference_is_the_definition(layout, call):
    """Also where it takes several turns for the scores of a sequence."""
    case = case_of((4, 40, 70, 4, 2, 64), call, layout=layout, lengths="gaps:1", lse="yes")
    tensors = Operands(OP, case, 3, "uniform", CPU).tensors
    whole = run_reference(OP, case, tensors)
    module = __import__("minfer.ops.prefill_attention", fromlist=["MOST_SCORES"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_SCORES", 1000)
        parts = run_reference(OP, case, tensors)
    first_q = first_k = 0
    for number, (queries, keys) in enumerate(module.lengths_of(case)):
        if layout == "packed":
            rows, cols = slice(first_q, first_q + queries), slice(first_k, first_k + keys)
            first_q, first_k = first_q + queries, first_k + keys
        else:
            rows, cols = (number, slice(queries)), (number, slice(keys))
        out, lse = definition(
            *(tensors[name][at] for name, at in (("q", rows), ("k", cols), ("v", cols))), **OP.call(case)
        )
        for found in (whole, parts):
            torch.testing.assert_close(found["out"].value[rows], out)
            of_lse = found["lse"].value[:, rows] if layout == "packed" else found["lse"].value[number, :, :queries]
            torch.testing.assert_close(of_lse, lse)
    if layout == "padded":
        assert not whole["out"].value[1].any() and bool((whole["lse"].value[1] == -INF).all())


def wrong(how):
    """`torch_eager` with a mistake."""

    def kernel(out, lse, q, k, v, q_seqlens, kv_seqlens, causal, window, softcap):
        eager = baselines.eager
        if how == "one key too many" and causal:
            eager(out, lse, q, k, v, q_seqlens, kv_seqlens, False, 0, softcap)
        elif how == "aligned with the first key" and causal:
            eager(out, lse, q, k[:, : q.shape[1]], v[:, : q.shape[1]], q_seqlens, kv_seqlens, causal, window, softcap)
        elif how == "no maximum":
            scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * q.shape[3] ** -0.5
            exponentials = scores.exp() * seen(q.shape[1], k.shape[1], causal, window)
            out.copy_(torch.einsum("bhij,bjhd->bihd", exponentials / exponentials.sum(-1, keepdim=True), v.float()))
        elif how == "scores in half precision":
            scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()).half() * q.shape[3] ** -0.5
            scores = scores.float().masked_fill(~seen(q.shape[1], k.shape[1], causal, window), -INF)
            out.copy_(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.float()))
        elif how == "a key left out":
            k = k.clone()
            k[:, 5] = -100 * q[:, :, :, :].mean((1, 2), keepdim=True)[:, 0].sign()
            eager(out, lse, q, k, v, q_seqlens, kv_seqlens, causal, window, softcap)
        else:
            eager(out, lse, q, k, v, q_seqlens, kv_seqlens, causal, window, softcap)

    return kernel


@pytest.mark.parametrize(
    "how",
    ["one key too many", "aligned with the first key", "no maximum", "scores in half precision", "a key left out"],
)
def test_a_wrong_kernel_is_seen(how):
    case = case_of((1, 60, 120, 1, 1, 64))
    kernel = ops.Kernel(OP.name, "wrong", "torch", OP.source, params={"call": ("causal",)}, requires=only(case))
    verify(OP, case, kernel, wrong("nothing"), CPU, None, seed=1)
    with pytest.raises(WrongResult):
        verify(OP, case, kernel, wrong(how), CPU, None, seed=1)


def only(case):
    return lambda other: None if other.shape == case.shape and other.params == case.params else "is not that one"


@pytest.mark.parametrize("page", ["1", "16", "64"])
def test_what_no_sequence_has_in_its_pages_is_poison(page):
    for layout in ("padded", "packed"):
        case = case_of((3, 20, 30, 2, 1, 64), layout=layout, lengths="gaps:1", page=page)
        tensors, slots = Operands(OP, case, 1, "normal", CPU).tensors, int(page)
        keys = tensors["kv_seqlens"].tolist()
        used = [-(-count // slots) for count in keys]
        assert len(tensors["k"]) == len(tensors["v"]) == sum(used) + 2
        for name in ("k", "v"):
            assert int((~tensors[name].isnan()).all(-1).sum()) == sum(keys)
            for row, count, number in zip(tensors["page_table"].long(), used, keys, strict=True):
                assert not tensors[name][row[:count]].flatten(0, 1)[:number].isnan().any()
                assert bool((row[count:] > 1 << 29).all())
        assert OP.traffic_of(case)[0] == OP.traffic_of(case_of((3, 20, 30, 2, 1, 64), lengths="gaps:1"))[0] + 4 * sum(
            used
        )


def test_a_case_names_pages_only_where_there_are_some():
    """So keys of rows are as they were before the op had pages."""
    assert "page" not in case_of((1, 4, 4, 2, 1, 64)).key and case_of((1, 4, 4, 2, 1, 64), page="none").params.keys() == {
        "layout", "lengths", "lse"
    }  # fmt: skip
    assert ",page=16/" in case_of((1, 4, 4, 2, 1, 64), page="16").key
    assert OP.kernels["cpu_naive"].takes(case_of((1, 4, 4, 2, 1, 64))) is None
    assert OP.kernels["cpu_naive_paged"].takes(case_of((1, 4, 4, 2, 1, 64))) == "supports page=1 or 16 or 64, not none"


def test_what_lies_behind_a_length_is_poison():
    for layout in ("padded", "packed"):
        case = case_of((3, 20, 30, 2, 1, 64), layout=layout, lengths="gaps:1")
        tensors = Operands(OP, case, 1, "normal", CPU).tensors
        assert bool(tensors["k"].isnan().any()) and bool(tensors["v"].isnan().any())
        assert bool(tensors["q"].isnan().any()) == (layout == "padded")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_verification_has_scores_of_hundreds(dtype):
    case = case_of((1, 64, 64, 1, 1, 64), "full", dtype)
    q, k = (Operands(OP, case, 1, "uniform", CPU).tensors[name][0, :, 0].double() for name in ("q", "k"))
    scores = q @ k.t() / 8
    assert float(scores.max()) > 150 and float(scores.min()) < -150
    cancels = scores[19, 1::4]
    assert float(cancels.abs().max()) < 1e-3 < float((q[19].abs() @ k[1::4].abs().t()).min())


@pytest.mark.parametrize("name", ["cpu_naive", "cpu_blocked"])
@pytest.mark.parametrize("counts", [[0, 1, 0, 65, 129, 2], [1], [0, 0], [63, 64, 65]])
def test_kernels_take_lengths_off_every_tile_and_none(name, counts):
    function = build.function(OP.kernels[name])
    q_seqlens = torch.tensor([0, *counts]).cumsum(0).int()
    keys = [count + 3 * (i % 2) for i, count in enumerate(counts)]
    kv_seqlens = torch.tensor([0, *keys]).cumsum(0).int()
    q, k, v = random(sum(counts), 4, 64), random(sum(keys), 2, 64), random(sum(keys), 2, 64)
    for causal, window in ((True, 0), (False, 0), (True, 64), (False, 65)):
        out, lse = torch.full_like(q, math.nan), torch.full((4, len(q)), math.nan)
        function(out, lse, q, k, v, q_seqlens, kv_seqlens, causal=causal, window=window)
        for i, count in enumerate(counts):
            rows, cols = (
                slice(int(q_seqlens[i]), int(q_seqlens[i + 1])),
                slice(int(kv_seqlens[i]), int(kv_seqlens[i + 1])),
            )
            if count:
                wanted, wanted_lse = definition(q[rows], k[cols], v[cols], causal, window)
                near(out[rows], wanted)
                near(lse[:, rows], wanted_lse, torch.float32)


DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]  # of q and k, and of v


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (9, 70), (70, 9)])
def test_attention_is_the_definition(queries, keys, dim, v_dim, dtype):
    q, k, v = (random(2, *of, dtype=dtype) for of in ((queries, 6, dim), (keys, 2, dim), (keys, 2, v_dim)))
    for scalars in ({}, {"causal": True}, {"causal": True, "window": 5}, {"softcap": 3.0}, {"scale": 0.3, "window": 9}):
        out, lse = attention(q, k, v, return_lse=True, **scalars)
        assert out.shape == (2, queries, 6, v_dim) and out.is_contiguous()
        assert lse.shape == (2, 6, queries) and lse.dtype == torch.float32
        for i in range(2):
            wanted, wanted_lse = definition(q[i], k[i], v[i], **scalars)
            near(out[i], wanted, dtype)
            near(lse[i], wanted_lse, torch.float32)


@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_attention_of_packed_and_of_padded_sequences_agree(dim, v_dim):
    counts, keys = [3, 0, 40, 1], [9, 4, 40, 1]
    of_q, of_kv = (torch.tensor([0, *of]).cumsum(0).int() for of in (counts, keys))
    q, k, v = random(44, 4, dim), random(54, 2, dim), random(54, 2, v_dim)
    packed = attention(q, k, v, causal=True, cu_seqlens=(of_q, of_kv))
    padded = [torch.full((4, 40, *x.shape[1:]), math.nan).half() for x in (q, k, v)]
    for x, to, ends in zip((q, k, v), padded, (of_q, of_kv, of_kv), strict=True):
        for i in range(4):
            to[i, : ends[i + 1] - ends[i]] = x[ends[i] : ends[i + 1]]
    lengths = tuple(torch.tensor(of, dtype=torch.int32) for of in (counts, keys))
    found = attention(*padded, causal=True, lengths=lengths)
    for i, count in enumerate(counts):
        assert torch.equal(found[i, :count], packed[of_q[i] : of_q[i + 1]])
        assert not found[i, count:].any()
    alike = attention(q, q[:, :2], q[:, 2:, :v_dim], cu_seqlens=of_q)
    near(alike[3:43], definition(q[3:43], q[3:43, :2], q[3:43, 2:, :v_dim])[0])


def test_a_sink_adds_to_the_denominator_of_any_heads():
    sinks = torch.tensor([-1.0, 0.5, 2.0, 30.0])
    for dim, v_dim in DIMS:
        q, k, v = random(1, 7, 4, dim), random(1, 9, 2, dim), random(1, 9, 2, v_dim)
        out, lse = definition(q[0], k[0], v[0], True)
        wanted = out * torch.sigmoid(lse - sinks[:, None]).t()[..., None]
        near(attention(q, k, v, causal=True, sinks=sinks)[0], wanted)


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "v_dim"), DIMS)
def test_a_captured_graph_stays_right_when_lengths_change_in_place(dim, v_dim):
    device = pick("cuda")
    q, k, v = random(300, 6, dim), random(300, 2, dim), random(300, 2, v_dim)
    q[290:], k[290:], v[290:] = math.nan, math.nan, math.nan  # behind the last sequence
    on_gpu, ends = [x.to(device) for x in (q, k, v)], torch.tensor([0, 290, 290, 290], dtype=torch.int32, device=device)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        attention(*on_gpu, causal=True, cu_seqlens=ends)  # compiles
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = attention(*on_gpu, causal=True, cu_seqlens=ends)
        for to in ([0, 290, 290, 290], [0, 1, 1, 290], [0, 64, 193, 290], [0, 129, 288, 290]):
            ends.copy_(torch.tensor(to))
            graph.replay()
            found = captured.cpu()
            for begin, end in itertools.pairwise(sorted({*to})):
                near(found[begin:end], definition(*(x[begin:end] for x in (q, k, v)), True)[0])


def test_lengths_that_contradict_the_tensors_read_nothing_outside():
    q, k, v = random(2, 5, 2, 64), random(2, 6, 2, 64), random(2, 6, 2, 64)
    huge = torch.tensor([2**31 - 1, -7], dtype=torch.int32)
    found = attention(q, k, v, lengths=huge)
    near(found[0], definition(q[0], k[0], v[0])[0])
    assert not found[1].any()
    ends = torch.tensor([-5, 2**30, 3, 9], dtype=torch.int32)
    attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens=ends)


def test_attention_reads_parts_of_a_projection_and_copies_what_lies_badly():
    projection = random(2, 9, 8, 64)
    parts = projection[:, :, :4], projection[:, :, 4:6], projection[:, :, 6:]
    wide = random(2, 9, 8, 67)[..., 1:65]
    for q, k, v in (parts, (wide[:, :, :4], wide[:, :, 4:6], wide[:, :, 6:]), (parts[0].flip(1), parts[1], parts[2])):
        found = attention(q, k, v, causal=True)
        near(found[1], definition(q[1], k[1], v[1], True)[0])
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    near(attention(*heads_first)[0], definition(*(x[0] for x in parts))[0])


def test_nothing_to_do():
    q, k = random(2, 3, 2, 64), random(2, 0, 2, 64)
    out, lse = attention(q, k, k, return_lse=True)
    assert not out.any() and bool((lse == -INF).all())
    assert attention(q[:0], q[:0], q[:0]).shape == (0, 3, 2, 64)


@pytest.mark.slow
def test_it_is_an_op_like_pytorchs_own():
    q, k = random(2, 5, 4, 64), random(2, 7, 2, 64)
    two = torch.tensor([5, 3], dtype=torch.int32)
    for dims, v_dim in ((1, 64), (3, 128)):
        tensors = q.repeat(1, 1, 1, dims), k.repeat(1, 1, 1, dims), random(2, 7, 2, v_dim)
        arguments = (*tensors, two, two, torch.zeros(4), None, None, True, 0, 0.0, 0.0, True)
        torch.library.opcheck(torch.ops.minfer.attention.default, arguments)
    pages = torch.zeros(2, 1, dtype=torch.int32)
    for queries, ends in ((q, two), (q[0], torch.tensor([0, 2, 5], dtype=torch.int32))):
        caches = random(3, 8, 2, 64), random(3, 8, 2, 64)
        arguments = (queries, *caches, ends, two, None, pages, None, True, 0, 0.0, 0.0, True)
        torch.library.opcheck(torch.ops.minfer.attention.default, arguments)
    compiled = torch.compile(lambda *x: attention(*x, causal=True), backend="aot_eager", fullgraph=True, dynamic=True)
    for keys in (7, 8):
        k = random(2, keys, 2, 64)
        assert torch.equal(compiled(q, k, k), attention(q, k, k, causal=True))


def test_mistakes_are_a_sentence_each():
    q, k, ends = random(2, 5, 4, 64), random(2, 7, 2, 64), torch.tensor([0, 5], dtype=torch.int32)
    table, beside = (
        torch.zeros(2, 3, dtype=torch.int32),
        "lengths .* beside a page_table, or cu_seqlens of .*",
    )
    for arguments, keywords, said in (
        ((q.float(), k, k), {}, "q of float16 or bfloat16, got torch.float32"),
        ((q, k.bfloat16(), k), {}, "k of the dtype of q, torch.float16, got torch.bfloat16"),
        ((q, k, k.to("meta")), {}, "v on the device of q, cpu, got meta"),
        ((q[..., :40], k, k), {}, "q whose head_dim is 64, 96, 128, 192 or 256, got 40"),
        ((q, k[:1], k), {}, r"k of \(2, seq_kv, kv_heads, 64\), got \(1, 7, 2, 64\)"),
        ((q, k, k[:, :3]), {}, r"v of \(2, 7, 2, 64\), got \(2, 3, 2, 64\)"),
        ((q, k, k[..., :32]), {}, r"v of \(2, 7, 2, 64\), got \(2, 7, 2, 32\)"),
        ((*(x.repeat(1, 1, 1, 3) for x in (q, k)), k), {}, r"v of \(2, 7, 2, 192\), got \(2, 7, 2, 64\)"),
        ((q[:, :, :3], k, k), {}, "k whose kv_heads divide the 3 heads, got 2"),
        ((q[0], k[0], k[0]), {}, r"q of \(batch, seq, heads, head_dim\), got \(5, 4, 64\)"),
        ((q, k, k), {"cu_seqlens": ends}, r"q of \(tokens, heads, head_dim\) with cu_seqlens, got \(2, 5, 4, 64\)"),
        ((q, k, k), {"cu_seqlens": ends, "lengths": ends}, "cu_seqlens, .* or lengths, for padded ones, got both"),
        ((q, k, k), {"lengths": ends.long()}, r"lengths of int32 and the shape \(2,\), got torch.int64, \(2,\)"),
        ((q, k, k), {"lengths": (ends, ends[:1])}, r"lengths of int32 and the shape \(2,\), got torch.int32, \(1,\)"),
        ((q[0], k[0], k[0]), {"cu_seqlens": (ends, ends[:1])}, r"cu_seqlens of int32 and the shape \(2,\), got .*\(1,\)"),
        ((q, k, k), {"window": 0}, "a window above 0, or None, got 0"),
        ((q, k, k), {"softcap": -1.0}, "a softcap above 0, or None, got -1.0"),
        ((q, k, k), {"page_table": table}, f"{beside} and lengths of keys, got neither"),
        ((q[0], k, k), {"page_table": table, "cu_seqlens": ends}, f"{beside} and lengths of keys, got cu_seqlens"),
        (
            (q[0], k, k),
            {"page_table": table, "cu_seqlens": (ends, ends), "lengths": ends},
            f"{beside} and lengths of keys, got a pair of cu_seqlens and lengths",
        ),
        ((q[0], k, k), {"page_table": table, "lengths": ends}, r"q of \(batch, seq, heads, head_dim\), got \(5, 4, 64\)"),
        (
            (q, k, k),
            {"page_table": table[:1], "lengths": ends},
            r"page_table of int32 and the shape \(2, most_pages\), got torch.int32, \(1, 3\)",
        ),
        (
            (q[0], k, k),
            {"page_table": table, "cu_seqlens": ends, "lengths": ends},
            r"lengths of int32 and the shape \(1,\), got torch.int32, \(2,\)",
        ),
        ((q, k, k[:1]), {"page_table": table, "lengths": ends}, r"v of \(2, 7, 2, 64\), got \(1, 7, 2, 64\)"),
        ((q, k, k), {"page_table": table, "lengths": ends}, "k whose slots are a power of two, got 7"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^minfer.attention takes {said}$"):
            attention(*arguments, **keywords)
    with pytest.raises(
        TypeError, match=r"^minfer.attention takes a tensor as cu_seqlens, or a pair of them, got \[0, 5, 9\]$"
    ):
        attention(q[0], k[0], k[0], cu_seqlens=[0, 5, 9])
    with pytest.raises(RuntimeError, match=r"^minfer.attention has no backward: call it under torch.no_grad\(\)"):
        attention(q.requires_grad_(), k, k)


def test_torch_eager_is_within_the_bound_by_far():
    """The bound leaves no room for a mistake: fp32 throughout takes a fourth of it."""
    case = case_of((1, 30, 300, 1, 1, 128), dtype="bfloat16")
    operands, fresh = (Operands(OP, case, 1, "normal", CPU) for _ in range(2))
    OP.kernels["torch_eager"].function(*operands.arguments, **OP.call(case))
    expected = run_reference(OP, case, fresh.tensors)
    found = compare_output(OP, case, "out", fresh.tensors | operands.named("out"), expected)
    assert 0.01 < found.over_bound < 0.3
