"""`mla_decode`: what the op states, `minfer.mla_decode`, an op like PyTorch's own, and what the page says it saves."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch

from minfer import mla_decode, ops
from minfer.bench.errors import run_reference
from minfer.bench.operands import Operands
from minfer.build import device_code, toolchain
from minfer.ops.decode_attention import lengths_of, rows_of
from minfer.ops.mla_decode.baselines import LATENT, ROW, SCALE
from minfer.profilers import sass
from tests.emulator import Emulated, KernelError, compiled
from tools import print_mla_savings

pytestmark = pytest.mark.usefixtures("one_thread")
OP = ops.get("mla_decode")
CPU = torch.device("cpu")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "mla_decode.md"


def case_of(shape: tuple[int, ...], kernel: str = "torch_eager", **params: str) -> ops.Case:
    return OP.case(kernel, "float16", dict(zip(OP.axes, shape, strict=True)), params)


def definition(q, rows, scale=SCALE):
    """One sequence in fp64: q (new, heads, 576), rows (keys, 576)."""
    new, keys, rows = len(q), len(rows), rows.double()
    seen = torch.arange(keys) <= (torch.arange(new) + keys - new)[:, None]
    scores = torch.einsum("ihd,jd->hij", q.double(), rows) * scale
    p = torch.softmax(scores.masked_fill(~seen, -math.inf), -1).nan_to_num(0.0)
    return torch.einsum("hij,jd->ihd", p, rows[:, :LATENT])


def paged(counts, new, heads, poison=math.nan, dtype=torch.float16):
    """q, the rows of each sequence, and a cache and a table that have them."""
    used = [-(-count // 64) for count in counts]
    order = torch.randperm(sum(used) + 3)
    table = torch.full((len(counts), max([1, *used])), 0x3FFFFFFF, dtype=torch.int32)
    cache = torch.full((len(order), 64, ROW), poison, dtype=dtype)
    rows, first = [torch.randn(count, ROW).to(dtype) for count in counts], 0
    for i, x in enumerate(rows):
        table[i, : used[i]] = order[first : first + used[i]]
        first += used[i]
        for j in range(used[i]):
            part = x[j * 64 : (j + 1) * 64]
            cache[table[i, j], : len(part)] = part
    return torch.randn(len(counts), new, heads, ROW).to(dtype), rows, cache, table


@pytest.mark.parametrize("page", ["none", "64"])
def test_the_reference_is_the_definition_and_the_rest_is_poison(page):
    case = case_of((4, 3, 70, 3), page=page, lengths="gaps:1")
    tensors = Operands(OP, case, 3, "normal", CPU).tensors
    found = run_reference(OP, case, tensors)["out"].value
    counts = lengths_of(case)
    assert 0 in counts and bool(tensors["cache"].isnan().any())
    assert page == "none" or int(tensors["page_table"].max()) >= len(tensors["cache"])
    for i, count in enumerate(counts):
        rows = rows_of(case, tensors, "cache", i, count)
        assert not rows.isnan().any() and len(rows) == count
        torch.testing.assert_close(found[i], definition(tensors["q"][i], rows))


def test_the_scale_is_an_argument_of_the_call():
    tensors = Operands(OP, case_of((1, 1, 20, 2)), 3, "normal", CPU).tensors
    found = run_reference(OP, case_of((1, 1, 20, 2), call="yarn"), tensors)["out"].value
    wanted = definition(tensors["q"][0], tensors["cache"][0], OP.calls["yarn"]["scale"])
    torch.testing.assert_close(found[0], wanted)


def test_uniform_inputs_have_scores_of_three_hundred_of_both_signs_and_such_that_cancel():
    tensors = Operands(OP, case_of((1, 1, 128, 8)), 1, "uniform", CPU).tensors
    scores = tensors["q"][0, 0].double() @ tensors["cache"][0].double().t() * SCALE
    assert float(scores[1::4].max()) > 300 and float(scores[1::4].min()) < -300
    assert float(scores[3, 1::4].abs().max()) < 1e-2


def test_bytes_and_flops_are_those_of_keys_that_are_seen():
    case = case_of((3, 2, 128, 4), page="64", lengths="halving")
    read, written = OP.traffic_of(case)
    rows, keys = 3 * 2 * 4, 128 + 64 + 32
    assert (read, written) == ((rows + keys) * 576 * 2 + 4 * (3 + 2 + 1 + 1), rows * 512 * 2)
    assert OP.flops(case) == 2 * 4 * (576 + 512) * sum(n + n - 1 for n in (128, 64, 32))


COUNTS = [0, 1, 15, 63, 64, 65, 129, 2]


@pytest.mark.parametrize("new", [1, 4])
def test_mla_decode_is_the_definition(new):
    q, rows, cache, table = paged(COUNTS, new, 3)
    lengths = torch.tensor(COUNTS, dtype=torch.int32)
    out = mla_decode(q, cache, lengths, page_table=table, check_pages=True)
    assert out.shape == (len(COUNTS), new, 3, LATENT)
    for i, x in enumerate(rows):
        torch.testing.assert_close(out[i].double(), definition(q[i], x), rtol=2e-3, atol=2e-3)


def test_it_is_attention_whose_projections_are_absorbed():
    """Keys and values made from the latents, head by head, give the same."""
    keys, heads = 40, 2
    of_key, of_value = (torch.randn(heads, LATENT, 128, dtype=torch.float64) / LATENT**0.5 for _ in range(2))
    plain, rotated = torch.randn(heads, 128, dtype=torch.float64), torch.randn(heads, 64, dtype=torch.float64)
    rows = torch.randn(keys, ROW, dtype=torch.float64).bfloat16()
    latents, shared = rows[:, :LATENT].double(), rows[:, LATENT:].double()
    k = torch.cat((torch.einsum("jl,hld->hjd", latents, of_key), shared.expand(heads, keys, 64)), -1)
    v = torch.einsum("jl,hld->hjd", latents, of_value)
    wanted = torch.softmax(torch.einsum("hd,hjd->hj", torch.cat((plain, rotated), -1), k) * SCALE, -1)[:, None] @ v
    q = torch.cat((torch.einsum("hd,hld->hl", plain, of_key), rotated), -1)[None, None]
    out = mla_decode(q.bfloat16(), rows[None], torch.tensor([keys], dtype=torch.int32))[0, 0].double()
    torch.testing.assert_close(torch.einsum("hl,hld->hd", out, of_value), wanted[:, 0], rtol=0.03, atol=0.03)


def test_lengths_and_pages_that_contradict_the_tensors_read_nothing_outside():
    q, _rows, cache, table = paged([16, 16], 1, 2, poison=0.0)
    mla_decode(q, cache, torch.tensor([2**31 - 1, -7], dtype=torch.int32), page_table=table.clone().fill_(-5))


def test_it_is_an_op_like_pytorchs_own():
    q, _rows, cache, table = paged([70, 9], 1, 2)
    lengths = torch.tensor([70, 9], dtype=torch.int32)
    torch.library.opcheck(torch.ops.minfer.mla_decode.default, (q, cache, lengths, table, 0.1))
    compiled_one = torch.compile(lambda *x: mla_decode(*x), backend="aot_eager", fullgraph=True)
    rows = torch.randn(2, 70, ROW).half()
    assert torch.equal(compiled_one(q, rows, lengths), mla_decode(q, rows, lengths))


def test_mistakes_are_a_sentence_each():
    q, _, cache, table = paged([70, 9], 1, 2)
    lengths = torch.tensor([70, 9], dtype=torch.int32)
    for arguments, keywords, said in (
        ((q.float(), cache, lengths), {}, "q of float16 or bfloat16, got torch.float32"),
        ((q[..., :512], cache, lengths), {}, r"q of \(batch, new, heads, 576\), got \(2, 1, 2, 512\)"),
        ((q.expand(2, 9, 2, ROW), cache, lengths), {}, "q whose new is from 1 to 8, got 9"),
        ((q, cache.bfloat16(), lengths), {}, "cache of the dtype of q, torch.float16, got torch.bfloat16"),
        ((q, cache[:, :, None], lengths), {}, r"cache of \(2, slots, 576\), got .*"),
        (
            (q, cache, lengths.long()),
            {"page_table": table},
            r"lengths of int32 and the shape \(2,\), got torch.int64, \(2,\)",
        ),
        ((q, cache, lengths), {}, r"cache of \(2, slots, 576\), got \(6, 64, 576\)"),
        (
            (q, cache, lengths),
            {"page_table": table[:1]},
            r"page_table of int32 and the shape \(2, most_pages\), got .*",
        ),
        ((q, cache[:, :16], lengths), {"page_table": table}, r"cache of \(pages, 64, 576\), got \(6, 16, 576\)"),
        ((q, cache, lengths), {"scale": -1.0}, "a scale above 0, or None, got -1.0"),
        ((q, cache, lengths.to("meta")), {"page_table": table}, "lengths on the device of q, cpu, got meta"),
        (
            (q, cache, lengths),
            {"page_table": table + 100, "check_pages": True},
            r"pages of page_table from 0 to 5, got 1\d\d",
        ),
        ((q, cache, lengths * 9), {"page_table": table, "check_pages": True}, "lengths from 0 to 128, got 630"),
    ):
        with pytest.raises(ValueError, match=f"^minfer.mla_decode takes {said}$"):
            mla_decode(*arguments, **keywords)
    with pytest.raises(RuntimeError, match=r"^minfer.mla_decode has no backward: call it under torch.no_grad\(\)"):
        mla_decode(q.requires_grad_(), cache, lengths, page_table=table)


def test_the_page_has_the_tables_that_are_computed():
    text = PAGE.read_text()
    assert print_mla_savings.savings() in text and print_mla_savings.roofs() in text


def test_the_pages_ratios_are_those_of_the_tables():
    text = " ".join(PAGE.read_text().split())
    mha, gqa, _mqa, anew, absorbed = print_mla_savings.schemes()
    for said, value in (
        ("{} times fewer bytes than in MHA", f"{mha.bytes / absorbed.bytes:.0f}"),
        ("{} times fewer than in GQA with eight heads", f"{gqa.bytes / absorbed.bytes:.1f}"),
        ("{} times the FLOPs. Extra", f"{absorbed.flops / mha.flops:.2f}"),
        ("would take {} times the FLOPs of absorbed MLA", f"{anew.flops / absorbed.flops:.0f}"),
        ("{} with 128 heads", f"{absorbed.flops / absorbed.bytes:.0f}"),
        ("{} FLOPs a byte. 128 heads", f"{print_mla_savings.FLOPS_S / print_mla_savings.BYTES_S:.0f}"),
        (
            "600 TFLOP/s with 128 heads is at {} % of the compute roof",
            f"{600e12 / print_mla_savings.FLOPS_S:.0%}".removesuffix("%"),
        ),
        (
            "at the same time at {} % of",
            f"{600e12 * absorbed.bytes / absorbed.flops / print_mla_savings.BYTES_S:.0%}".removesuffix("%"),
        ),
    ):
        assert said.format(value) in text


def test_the_savings_agree_with_what_the_op_counts():
    """A cached token more costs what the table says."""
    more, fewer = (case_of((1, 1, longest, 128)) for longest in (1001, 1000))
    scheme = print_mla_savings.schemes()[-1]
    assert OP.bytes(more) - OP.bytes(fewer) == scheme.bytes
    assert OP.flops(more) - OP.flops(fewer) == scheme.flops


NO_HEADERS = "no headers of a CUDA toolkit that fits this PyTorch"
without_toolkit = pytest.mark.skipif(toolchain.toolkit() is None, reason=NO_HEADERS)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return cache(lambda name: Emulated(OP.kernels[name], compiled(OP.kernels[name], tmp_path_factory.mktemp(name))))


@pytest.mark.slow
@without_toolkit
@pytest.mark.parametrize(
    ("name", "heads", "counts"),
    [
        ("v03_wgmma", 2, [700, *(i % 20 for i in range(15))]),
        ("v03_wgmma", 2, [3, 0, 700, *[1] * 13]),
        ("v03_wgmma", 2, [0] * 16),
        ("v03_wgmma", 66, [500, 3, 0, 70]),
        ("v04_cluster", 66, [500, 3, 0, 70]),
        ("v04_cluster", 66, [1, 0, 500, 1]),
    ],
)
def test_one_long_sequence_among_short_ones_and_again_when_lengths_change(emulated, name, heads, counts):
    """Parts of several blocks, the same bits in any order of blocks; counters and barriers are as before for the next call."""
    q, rows, latents, table = paged(counts, 1, heads)
    lengths, found = torch.tensor(counts, dtype=torch.int32), {}
    for _ in range(4):
        out = torch.full((len(counts), 1, heads, LATENT), math.nan).half()
        function = emulated(name)
        function(out, q, lengths, table, latents, scale=SCALE)
        # On the emulator another number of clusters runs at once in each call, and the sums are of other parts.
        found.setdefault(function.seed % 4 if name == "v04_cluster" else 0, set()).add(out.numpy().tobytes())
        for i, x in enumerate(rows):
            torch.testing.assert_close(out[i].double(), definition(q[i], x), rtol=2e-3, atol=2e-3)
    assert all(len(each) == 1 for each in found.values())


@pytest.mark.slow
@without_toolkit
@pytest.mark.parametrize(("heads", "longest"), [(64, 1600), (2, 1600), (130, 1100)])
def test_items_of_up_to_eight_parts(emulated, heads, longest):
    """With 64 heads each warp merges whole rows, four parts at a time; with 2 heads quarters of rows, 16 parts at a time."""
    q, rows, latents, table = paged([longest, 5], 1, heads)
    function, out = emulated("v03_wgmma"), torch.full((2, 1, heads, LATENT), math.nan).half()
    function.run_on(8)
    try:
        function(out, q, torch.tensor([longest, 5], dtype=torch.int32), table, latents, scale=SCALE)
    finally:
        function.run_on(2)
    for i, x in enumerate(rows):
        torch.testing.assert_close(out[i].double(), definition(q[i], x), rtol=2e-3, atol=2e-3)


@pytest.mark.slow
@without_toolkit
@pytest.mark.parametrize("name", ["v03_wgmma", "v04_cluster"])
def test_products_do_not_wait_for_each_other(name):
    """Where ptxas sees a pipeline of products that it does not understand, it waits behind each product, and says so in a
    remark that nobody reads. Of 36 products for scores and three times four for out, it is for few that the code waits."""
    home = toolchain.toolkit()
    functions = sass.read(device_code.cached_cubin(OP.kernels[name], "sm_90a"), "sm_90a", home)
    kernels = [each.opcodes for each in functions if any("HGMMA" in opcode for opcode in each.opcodes)]
    assert len(kernels) == (2 if name == "v03_wgmma" else 4)  # of two dtypes; v04's also without clusters
    for opcodes in kernels:
        assert sum(n for opcode, n in opcodes.items() if opcode.startswith(("HGMMA.64x64", "HGMMA.64x256"))) == 48
        assert 4 <= opcodes["WARPGROUP.DEPBAR.LE"] <= 5


@pytest.mark.slow
@without_toolkit
def test_kernels_say_which_argument_is_wrong(emulated):
    function = emulated("v03_wgmma")
    q, _, cache, table = paged([70, 9], 1, 2)
    lengths, out = torch.tensor([70, 9], dtype=torch.int32), torch.empty(2, 1, 2, LATENT).half()
    for arguments, scale, said in (
        ((out, q[..., :512], lengths, table, cache), 0.1, "mla_decode: q must have size 576 in dimension 3, got 512"),
        ((out[..., :8], q, lengths, table, cache), 0.1, "mla_decode: out must have size 512 in dimension 3, got 8"),
        ((out, q, lengths[:1], table, cache), 0.1, "mla_decode: lengths must have size 2 in dimension 0, got 1"),
        ((out, q, lengths, table[:1], cache), 0.1, "mla_decode: page_table must have size 2 in dimension 0, got 1"),
        ((out, q, lengths, table, cache[:, :16]), 0.1, "mla_decode: cache must have pages of 64 slots, got 16"),
        ((out, q, lengths, table[:, :0], cache), 0.1, "mla_decode: cache must have size 2 in dimension 0, got "),
        ((out, q, lengths, table, cache.bfloat16()), 0.1, "mla_decode: cache must be float16, got bfloat16"),
        ((out, q, lengths, table, cache), 0.0, "mla_decode: scale must be above 0, got 0"),
    ):
        with pytest.raises(KernelError, match=said):
            function(*arguments, scale=scale)
