"""`decode_attention`: what the op states, and `minfer.decode_attention`, an op like PyTorch's own."""

from __future__ import annotations

import math

import pytest
import torch

from minfer import decode_attention, ops
from minfer.bench.errors import run_reference
from minfer.bench.operands import Operands
from minfer.build import toolchain
from tests import sizes
from tests.emulator import Emulated, compiled

pytestmark = pytest.mark.usefixtures("one_thread")
OP = ops.get("decode_attention")
CPU = torch.device("cpu")


def case_of(shape: tuple[int, ...], kernel: str = "torch_eager", **params: str) -> ops.Case:
    return OP.case(kernel, "float16", sizes.named(OP, [shape])[0], params)


def definition(q, k, v, scale=None):
    """One sequence in fp64: q (new, heads, dim), k (keys, kv_heads, dim), v (keys, kv_heads, v_dim)."""
    new, keys = len(q), len(k)
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * (scale or q.shape[2] ** -0.5)
    seen = torch.arange(keys) <= (torch.arange(new) + keys - new)[:, None]
    p = torch.softmax(scores.masked_fill(~seen, -math.inf), -1).nan_to_num(0.0)
    return torch.einsum("hij,jhd->ihd", p, v)


def paged(counts, new, heads, kv_heads, dim, page, poison=math.nan):
    """q, the keys and values of each sequence, and caches and a table that have them. Beside keys of 192 values have 128."""
    dims = dim, 128 if dim == 192 else dim
    used = [-(-count // page) for count in counts]
    order = torch.randperm(sum(used) + 3)
    table = torch.full((len(counts), max([1, *used])), 0x3FFFFFFF, dtype=torch.int32)
    caches = [torch.full((len(order), page, kv_heads, of), poison).half() for of in dims]
    rows, first = [], 0
    for i, count in enumerate(counts):
        table[i, : used[i]] = order[first : first + used[i]]
        first += used[i]
        both = [torch.randn(count, kv_heads, of).half() for of in dims]
        for cache, x in zip(caches, both, strict=True):
            for j in range(used[i]):
                part = x[j * page : (j + 1) * page]
                cache[table[i, j], : len(part)] = part
        rows.append(both)
    return torch.randn(len(counts), new, heads, dim).half(), rows, caches, table


@pytest.mark.parametrize("page", ["none", "16"])
def test_the_reference_is_the_definition_and_the_rest_is_poison(page):
    case = case_of((4, 3, 70, 4, 2, 64), page=page, lengths="gaps:1")
    tensors = Operands(OP, case, 3, "normal", CPU).tensors
    found = run_reference(OP, case, tensors)["out"].value
    module = __import__("minfer.ops.decode_attention", fromlist=["rows_of"])
    counts = module.lengths_of(case)
    assert 0 in counts and bool(tensors["k_cache"].isnan().any()) and bool(tensors["v_cache"].isnan().any())
    for i, count in enumerate(counts):
        k, v = (module.rows_of(case, tensors, name, i, count) for name in ("k_cache", "v_cache"))
        assert not k.isnan().any() and len(k) == count
        torch.testing.assert_close(found[i], definition(tensors["q"][i], k, v))


def test_uniform_inputs_have_scores_of_hundreds():
    tensors = Operands(OP, case_of((1, 1, 64, 8, 1, 64)), 1, "uniform", CPU).tensors
    q, k = tensors["q"][0, 0].double(), tensors["k_cache"][0, :, 0].double()
    scores = q @ k.t() / 8
    assert float(scores[1].max()) > 150 and float(scores[1].min()) < -150
    assert float(scores[3, 1::4].abs().max()) < 1e-3


def test_bytes_and_flops_are_those_of_keys_that_are_seen():
    case = case_of((3, 2, 32, 4, 2, 64), page="16", lengths="halving")
    read, written = OP.traffic_of(case)
    rows, keys = 3 * 2 * 4 * 64 * 2, 32 + 16 + 8
    assert (read, written) == (rows + 2 * keys * 2 * 64 * 2 + 4 * (3 + 2 + 1 + 1), rows)
    assert OP.flops(case) == 4 * 4 * 64 * sum(n + n - 1 for n in (32, 16, 8))


COUNTS = [0, 1, 15, 16, 17, 64, 129, 2]


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("new", [1, 4])
def test_decode_attention_is_the_definition(page, new):
    q, rows, caches, table = paged(COUNTS, new, 4, 2, 64, page)
    lengths = torch.tensor(COUNTS, dtype=torch.int32)
    out = decode_attention(q, *caches, lengths, page_table=table, check_pages=True)
    for i, (k, v) in enumerate(rows):
        torch.testing.assert_close(out[i].double(), definition(q[i], k, v), rtol=2e-3, atol=2e-3)


def test_contiguous_and_fp8_caches():
    q, k, v = torch.randn(2, 1, 4, 64).half(), torch.randn(2, 20, 2, 64), torch.randn(2, 20, 2, 64)
    lengths, scales = torch.tensor([20, 7], dtype=torch.int32), torch.tensor([0.5, 2.0])
    out = decode_attention(q, k.half(), v.half(), lengths, scale=0.3)
    k8, v8 = (x.to(torch.float8_e4m3fn) for x in (k, v))
    out8 = decode_attention(q, k8, v8, lengths, scales=scales)
    for i, count in enumerate((20, 7)):
        wanted = definition(q[i], k[i, :count].half(), v[i, :count].half(), 0.3)
        torch.testing.assert_close(out[i].double(), wanted, rtol=2e-3, atol=2e-3)
        wanted = definition(q[i], k8[i, :count].float() * 0.5, v8[i, :count].float() * 2)
        torch.testing.assert_close(out8[i].double(), wanted, rtol=2e-3, atol=2e-3)


def test_lengths_and_pages_that_contradict_the_tensors_read_nothing_outside():
    q, _rows, caches, table = paged([16, 16], 1, 2, 1, 64, 16, poison=0.0)
    decode_attention(q, *caches, torch.tensor([2**31 - 1, -7], dtype=torch.int32), page_table=table.clone().fill_(-5))


def test_it_is_an_op_like_pytorchs_own():
    q, _rows, caches, table = paged([30, 9], 1, 2, 1, 64, 16)
    lengths = torch.tensor([30, 9], dtype=torch.int32)
    arguments = (q, *caches, lengths, table, None, torch.zeros(2), None, 0.0, 7, 3.0)
    torch.library.opcheck(torch.ops.minfer.decode_attention.default, arguments)
    compiled_one = torch.compile(lambda *x: decode_attention(*x), backend="aot_eager", fullgraph=True)
    k = torch.randn(2, 30, 1, 64).half()
    assert torch.equal(compiled_one(q, k, k, lengths), decode_attention(q, k, k, lengths))


def test_mistakes_are_a_sentence_each():
    q, _, (k, v), table = paged([30, 9], 1, 4, 2, 64, 16)
    lengths, scales = torch.tensor([30, 9], dtype=torch.int32), torch.ones(2)
    for arguments, keywords, said in (
        ((q.float(), k, v, lengths), {}, "q of float16 or bfloat16, got torch.float32"),
        ((q[0], k, v, lengths), {}, r"q of \(batch, new, heads, head_dim\), got \(1, 4, 64\)"),
        ((q.expand(2, 17, 4, 64), k, v, lengths), {}, "q whose new is from 1 to 16, got 17"),
        ((q[..., :40], k, v, lengths), {}, "q whose head_dim is 64, 96, 128, 192 or 256, got 40"),
        ((q, k.bfloat16(), v, lengths), {}, "k_cache of the dtype of q, torch.float16, got torch.bfloat16"),
        (
            (q, k, v, lengths),
            {"scales": scales},
            r"k_cache of float8_e4m3fn and the shape \(2, slots, kv_heads, 64\), got torch.float16, .*",
        ),
        ((q, k, v[:, :8], lengths), {"page_table": table}, r"v_cache of \(6, 16, 2, 64\), got \(6, 8, 2, 64\)"),
        ((q[:, :, :3], k, v, lengths), {"page_table": table}, "k_cache whose kv_heads divide the 3 heads, got 2"),
        (
            (q, k, v, lengths.long()),
            {"page_table": table},
            r"lengths of int32 and the shape \(2,\), got torch.int64, \(2,\)",
        ),
        ((q, k, v, lengths), {}, r"k_cache of \(2, slots, kv_heads, 64\), got \(6, 16, 2, 64\)"),
        ((q, k, v, lengths), {"page_table": table[:1]}, r"page_table of int32 and the shape \(2, most_pages\), got .*"),
        ((q, k[:, :9], v[:, :9], lengths), {"page_table": table}, "k_cache whose slots are a power of two, got 9"),
        (
            (q, k, v, lengths),
            {"page_table": table, "mask": torch.ones(2, 1, 2).bool()},
            r"mask of bool and the shape \(2, 1, 1\), got torch.bool, \(2, 1, 2\)",
        ),
        (
            (q, k, v, lengths),
            {"page_table": table, "mask": torch.ones(2, 2).int()},
            r"mask of int32 and the shape \(2, 1\), got torch.int32, \(2, 2\)",
        ),
        (
            (q, k, v, lengths),
            {"page_table": table, "mask": torch.ones(2, 1, 1).bool(), "window": 3},
            "no window beside a mask, got 3",
        ),
        ((q, k, v, lengths), {"scale": 0.0}, "a scale above 0, or None, got 0.0"),
        ((q, k, v, lengths), {"window": -1}, "a window above 0, or None, got -1"),
        ((q, k, v, lengths), {"softcap": 0.0}, "a softcap above 0, or None, got 0.0"),
        (
            (q, k, v, lengths),
            {"page_table": table, "sinks": scales},
            r"sinks of float32 and the shape \(4,\), got torch.float32, \(2,\)",
        ),
        (
            (q, k, v, lengths),
            {"page_table": table + 100, "check_pages": True},
            r"pages of page_table from 0 to 5, got 1\d\d",
        ),
        ((q, k, v, lengths * 9), {"page_table": table, "check_pages": True}, "lengths from 0 to 32, got 270"),
    ):
        with pytest.raises(ValueError, match=f"^minfer.decode_attention takes {said}$"):
            decode_attention(*arguments, **keywords)
    with pytest.raises(
        RuntimeError, match=r"^minfer.decode_attention has no backward: call it under torch.no_grad\(\)"
    ):
        decode_attention(q.requires_grad_(), k, v, lengths, page_table=table)


@pytest.mark.slow
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
def test_one_long_sequence_among_63_short_ones_and_again_when_lengths_change(tmp_path):
    """The shares of v04_balanced, with the same bits in any order of blocks; its counters are zero again for the next call."""
    function = Emulated(OP.kernels["v04_balanced"], compiled(OP.kernels["v04_balanced"], tmp_path))
    nothing = torch.empty(0)
    for counts in ([1200, *(i % 20 for i in range(63))], [3, 0, 700, *[1] * 61]):
        q, rows, caches, table = paged(counts, 1, 4, 2, 64, 16)
        lengths, found = torch.tensor(counts, dtype=torch.int32), set()
        for _ in range(3):
            out = torch.full_like(q, math.nan)
            function(out, q, lengths, table, *caches, nothing)
            found.add(out.numpy().tobytes())
        assert len(found) == 1
        for i, (k, v) in enumerate(rows):
            torch.testing.assert_close(out[i].double(), definition(q[i], k, v), rtol=2e-3, atol=2e-3)
