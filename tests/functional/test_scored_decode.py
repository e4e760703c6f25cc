"""A window, a soft cap and sinks in `minfer.decode_attention` and `minfer.attention`: on a CPU, emulated and on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from minfer import attention, decode_attention, ops
from minfer.bench.device import pick
from minfer.build import toolchain
from tests.emulator import Emulated, compiled
from tests.emulator.mistakes import SCORED, SINKS
from tests.functional.drawn_attention import attend
from tests.functional.test_decode_attention import paged

pytestmark = pytest.mark.usefixtures("one_thread")
OP = ops.get("decode_attention")
COUNTS = [0, 1, 15, 16, 17, 64, 129, 2]
# A window of one key, within a unit of 16 keys, of whole units, and longer than any sequence.
WINDOWS = [1, 7, 16, 40, 1000]
EACH = {
    "window": {"window": 40},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 40, "softcap": 2.0, "sinks": True},
}


def hide(caches: Sequence[torch.Tensor], table: torch.Tensor, counts: Sequence[int], new: int, window: int) -> None:
    """Writes NaN to the keys and values before the first that any new token sees; whole pages leave the table."""
    page = caches[0].shape[1]
    for row, count in enumerate(counts):
        for key in range(max(0, count - new + 1 - window)):
            for cache in caches:
                cache[table[row, key // page], key % page] = math.nan
        for done in range(max(0, count - new + 1 - window) // page):
            table[row, done] = 0x3FFFFFFF


def sinks_of(options: dict[str, object], heads: int) -> dict[str, object]:
    return options | {"sinks": torch.linspace(-4, 9, heads)} if "sinks" in options else options


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, object]) -> torch.Tensor:
    """One sequence in fp64; queries before its first key give 0."""
    given = {"window": None, "softcap": None, "sinks": None} | options
    given["sinks"] = None if given["sinks"] is None else given["sinks"].double()
    return attend(q.double(), k.double(), v.double(), True, q.shape[-1] ** -0.5, **given)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(("new", "heads", "kv_heads"), [(1, 6, 1), (4, 3, 3)])
@pytest.mark.parametrize("which", EACH)
def test_each_is_the_definition_and_keys_outside_the_window_may_be_nan(which, new, heads, kv_heads, page):
    for window in WINDOWS if "window" in EACH[which] else [0]:
        options = sinks_of(EACH[which] | ({"window": window} if window else {}), heads)
        q, rows, caches, table = paged(COUNTS, new, heads, kv_heads, 64, page)
        if window:
            hide(caches, table, COUNTS, new, window)
        lengths = torch.tensor(COUNTS, dtype=torch.int32)
        out = decode_attention(q, *caches, lengths, page_table=table, **options)
        for found, x, (k, v) in zip(out, q, rows, strict=True):
            torch.testing.assert_close(found.double(), definition(x, k, v, options), rtol=2e-3, atol=2e-3)
        assert torch.equal(out, decode_attention(q, *caches, lengths, page_table=table, **options))


def test_a_sink_of_minus_infinity_is_none_and_one_far_above_takes_all():
    q, _, caches, table = paged([30, 0, 9], 2, 4, 2, 64, 16)
    lengths = torch.tensor([30, 0, 9], dtype=torch.int32)
    none, all_of_it = (
        decode_attention(q, *caches, lengths, page_table=table, sinks=torch.full((4,), sink))
        for sink in (-torch.inf, 1e4)
    )
    torch.testing.assert_close(none, decode_attention(q, *caches, lengths, page_table=table), rtol=2e-3, atol=2e-3)
    assert not all_of_it.any()


def test_sinks_of_attention_count_in_the_sum_and_not_in_the_log_sum_exp():
    q, k, v = torch.randn(2, 20, 6, 64).half(), *torch.randn(2, 2, 33, 2, 64).half()
    sinks, lengths = torch.linspace(-4, 9, 6), (torch.tensor([20, 7]).int(), torch.tensor([33, 5]).int())
    out, lse = attention(q, k, v, causal=True, lengths=lengths, sinks=sinks, return_lse=True)
    without, same = attention(q, k, v, causal=True, lengths=lengths, return_lse=True)
    assert torch.equal(lse, same) and not torch.equal(out, without)
    for i, (m, n) in enumerate(zip(*(x.tolist() for x in lengths), strict=True)):
        wanted = definition(q[i, :m], k[i, :n], v[i, :n], {"sinks": sinks})
        torch.testing.assert_close(out[i, :m].double(), wanted, rtol=3e-3, atol=3e-3)
    packed = attention(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), causal=True, sinks=sinks,
        cu_seqlens=(torch.tensor([0, 20, 40]).int(), torch.tensor([0, 33, 66]).int()),
    )  # fmt: skip
    torch.testing.assert_close(packed[:20], out[0], rtol=2e-3, atol=2e-3)


def test_mistakes_of_sinks_are_a_sentence():
    q, sinks = torch.zeros(1, 1, 4, 64).half(), torch.zeros(4)
    for wrong in (sinks.half(), sinks[:3]):
        with pytest.raises(ValueError, match=r"^minfer.attention takes sinks of float32 and the shape \(4,\), got "):
            attention(q, q, q, sinks=wrong)


def error_of(
    scored: Emulated, counts: list[int], shape: tuple[int, int, int, int], options: dict[str, object]
) -> float:
    """The largest error of the kernel's entry, over pages of 16; shape is (new, heads, kv_heads, head_dim)."""
    new, heads, *rest = shape
    q, rows, caches, table = paged(counts, new, heads, *rest, 16)
    out = q.new_full((*q.shape[:3], caches[1].shape[3]), math.nan)
    if window := options.get("window", 0):
        hide(caches, table, counts, new, window)
    lengths = torch.tensor(counts, dtype=torch.int32)
    words = {"window": window, "softcap": options.get("softcap", 0.0)}
    added = [options.get(name, torch.empty(0)) for name in ("sinks", "mask")]
    scored(out, q, lengths, table, *caches, torch.empty(0), *added, **words)
    wanted = torch.stack([definition(x, *both, options) for x, both in zip(q, rows, strict=True)])
    return float((out.double() - wanted).abs().max())


@pytest.mark.slow
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
def test_the_kernel_of_a_gpu_is_the_definition_when_emulated_and_mistakes_are_seen(tmp_path):
    """With parts of a sequence in several blocks, in pages; contiguous in fp8; and with each mistake."""
    kernel = OP.kernels["v05_scored"]
    library = compiled(kernel, tmp_path, {i: {name: edit} for i, (name, edit) in enumerate(SCORED[1].items(), 1)})
    entry = replace(kernel, name="v05_scored_scored")
    scored = Emulated(entry, library)
    for which in EACH.values():
        for counts, shape in (
            (COUNTS, (1, 6, 1, 64)),
            ([0, 300, 41], (3, 6, 1, 128)),
            ([400], (8, 5, 1, 64)),
            ([70, 3], (1, 4, 4, 256)),
            ([170, 41], (3, 4, 2, 96)),
            ([300], (2, 6, 1, 192)),
        ):
            for window in (7, 129) if "window" in which else (0,):
                options = sinks_of(which, shape[1]) | ({"window": window} if window else {})
                assert error_of(scored, counts, shape, options) < 4e-3
    for mistake in range(1, len(SCORED[1]) + 1):
        options = sinks_of(EACH["all"], 4)
        assert not error_of(Emulated(entry, library, mistake), [60], (1, 4, 2, 64), options) < 4e-3

    tables = {52: torch.empty(2, 0, dtype=torch.int32), 4: torch.randperm(26).int().view(2, 13)}
    for (dim, v_dim), slots in itertools.product(((64, 64), (96, 96), (192, 128)), tables):
        q, table = torch.randn(2, 1, 4, dim).half(), tables[slots]
        caches = [torch.randn(104 // slots, slots, 2, of).to(torch.float8_e4m3fn) for of in (dim, v_dim)]
        out, scales, options = (
            torch.full((2, 1, 4, v_dim), math.nan).half(),
            torch.tensor([0.5, 2.0]),
            sinks_of(EACH["all"], 4),
        )
        lengths, words = torch.tensor([50, 33], dtype=torch.int32), {x: options[x] for x in ("window", "softcap")}
        scored(out, q, lengths, table, *caches, scales, options["sinks"], torch.empty(0), **words)
        for i, count in enumerate((50, 33)):
            pages = table[i].long() if table.numel() else [i]
            k, v = (x.float()[pages].flatten(0, 1)[:count] * scale for x, scale in zip(caches, scales, strict=True))
            torch.testing.assert_close(out[i].double(), definition(q[i], k, v, options), rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("which", EACH)
def test_on_a_gpu_and_in_a_graph_whose_lengths_change(which):
    device, counts = pick("cuda"), [1300, 17, 0, 64, 300, 1, 129, 700]
    for new, heads, kv_heads, dim in (
        (1, 8, 1, 64),
        (1, 8, 2, 128),
        (4, 6, 2, 256),
        (2, 64, 8, 64),
        (4, 6, 2, 96),
        (1, 16, 1, 192),
    ):
        options = sinks_of(EACH[which], heads)
        on_device = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        made = [paged(each, new, heads, kv_heads, dim, 16) for each in (counts, counts[::-1])]
        for each, (*_, caches, table) in zip((counts, counts[::-1]), made, strict=True):
            if "window" in options:
                hide(caches, table, each, new, options["window"])
        shared = [x.to(device) for x in (made[0][0], *made[0][2], torch.tensor(counts, dtype=torch.int32), made[0][3])]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            q, k, v, lengths, table = shared
            decode_attention(q, k, v, lengths, page_table=table, **on_device)  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                captured = decode_attention(q, k, v, lengths, page_table=table, **on_device)
            for each, (x, rows, caches, pages) in zip((counts, counts[::-1]), made, strict=True):
                for to, of in zip(shared, (x, *caches, torch.tensor(each, dtype=torch.int32), pages), strict=True):
                    to.copy_(of)
                graph.replay()
                found = captured.cpu()
                for got, one, (a, b) in zip(found, x, rows, strict=True):
                    torch.testing.assert_close(got.double(), definition(one, a, b, options), rtol=2e-3, atol=2e-3)
                again = decode_attention(q, k, v, lengths, page_table=table, **on_device)
                assert torch.equal(again.cpu(), found)


def random_prefill(dim: int, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, (k, v) = torch.randn(3, 70, heads, dim), torch.randn(2, 3, 150, kv_heads, dim)
    return q.half(), k.half(), v.half()


LENGTHS = ([70, 0, 33], [150, 20, 65])


@pytest.mark.slow
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
def test_sinks_within_the_kernel_for_short_sequences_are_the_definition_when_emulated(tmp_path):
    kernel = ops.get("prefill_attention").kernels["v08_compact"]
    entry = replace(kernel, name="v08_compact_sinks")
    library = compiled(kernel, tmp_path, {1: SINKS[1]})
    q, k, v = random_prefill(64, 6, 3)
    lengths, nothing = [torch.tensor(each, dtype=torch.int32) for each in LENGTHS], torch.empty(0)
    for mistake in (0, 1):
        errors = []
        for options in ({}, {"window": 20, "softcap": 2.0}):
            sinks, out = torch.linspace(-4, 9, 6), torch.full_like(q, math.nan)
            Emulated(entry, library, mistake)(out, nothing, q, k, v, *lengths, sinks, **options)
            for i, (m, n) in enumerate(zip(*LENGTHS, strict=True)):
                wanted = definition(q[i, :m], k[i, :n], v[i, :n], options | {"sinks": sinks})
                errors.append(float((out[i, :m].double() - wanted).abs().max()) if m else 0.0)
            assert not out[2, 33:].any()
        assert all(error < 4e-3 for error in errors) == (mistake == 0)  # max() would overlook NaN


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"window": 20, "softcap": 2.0}], ids=str)
def test_sinks_of_attention_on_a_gpu(dim, options):
    device = pick("cuda")
    q, k, v = random_prefill(dim, 8, 2)
    sinks, lengths = torch.linspace(-4, 9, 8), tuple(torch.tensor(each, dtype=torch.int32) for each in LENGTHS)
    on_device, of = [x.to(device) for x in (q, k, v)], tuple(x.to(device) for x in lengths)
    for packed in (False, True):
        given = {"causal": True, "sinks": sinks.to(device), "return_lse": True} | options
        if packed:
            rows = [
                torch.cat([x[i, :n] for i, n in enumerate(counts)])
                for x, counts in zip(on_device, (LENGTHS[0], LENGTHS[1], LENGTHS[1]), strict=True)
            ]
            ends = tuple(torch.tensor([0, *torch.tensor(each).cumsum(0)]).int().to(device) for each in LENGTHS)
            found, lse = attention(*rows, cu_seqlens=ends, **given)
            parts = found.cpu().split(LENGTHS[0])
        else:
            found, lse = attention(*on_device, lengths=of, **given)
            parts = [found[i, :m].cpu() for i, m in enumerate(LENGTHS[0])]
        given.pop("sinks")
        same = attention(
            *(rows if packed else on_device), **({"cu_seqlens": ends} if packed else {"lengths": of}), **given
        )[1]
        torch.testing.assert_close(lse, same, rtol=1e-4, atol=1e-4)
        for i, (part, m, n) in enumerate(zip(parts, *LENGTHS, strict=True)):
            wanted = definition(q[i, :m], k[i, :n], v[i, :n], options | {"sinks": sinks})
            torch.testing.assert_close(part.double(), wanted, rtol=4e-3, atol=4e-3)
