"""A captured CUDA graph of attention over a cache stays right when lengths, pages and the order of requests change in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from minfer import build, decode_attention, mla_decode, ops
from minfer.bench.device import capability, pick
from minfer.build import toolchain
from minfer.ops.mla_decode.baselines import LATENT, SCALE
from tests.functional import test_decode_attention as gqa
from tests.functional import test_mla_decode as mla

Tensors = dict[str, torch.Tensor]

# One long sequence among short ones, the same in another order, others, and none that is long. Each batch has pages of its own.
COUNTS = [1300, 17, 0, 64, 300, 1, 129, 700]
BATCHES = [COUNTS, COUNTS[::-1], [0, 2048, 2048, 5, 1, 1, 63, 2], [3] * 8]
PAGES = {"decode_attention": 16, "mla_decode": 64}
NEW, HEADS, KV_HEADS, DIM = 1, 8, 2, 128
MLA_HEADS = 70  # two tiles of query rows, of which the last one is not whole

FUNCTION = "the function"
CALLS = [
    (op, name)
    for op in PAGES
    for name in [FUNCTION, *(k.name for k in ops.get(op).kernels.values() if k.backend in ("cuda", "triton"))]
]


def batch_of(op: str, counts: Sequence[int]) -> tuple[Tensors, list[torch.Tensor]]:
    """The operands of one batch of requests, and what each sequence's result must be."""
    if op == "decode_attention":
        q, rows, (k, v), table = gqa.paged(counts, NEW, HEADS, KV_HEADS, DIM, PAGES[op])
        caches, wanted = (
            {"k_cache": k, "v_cache": v},
            [gqa.definition(x, *both) for x, both in zip(q, rows, strict=True)],
        )
    else:
        q, rows, cache, table = mla.paged(counts, NEW, MLA_HEADS)
        caches, wanted = {"cache": cache}, [mla.definition(x, each) for x, each in zip(q, rows, strict=True)]
    lengths = torch.tensor(counts, dtype=torch.int32)
    return {"q": q, "lengths": lengths, "page_table": table} | caches, wanted


def room_for(batches: Sequence[Tensors], device: torch.device) -> Tensors:
    """Tensors on the device that hold any of the batches."""
    sizes = {name: [max(n) for n in zip(*(batch[name].shape for batch in batches), strict=True)] for name in batches[0]}
    return {name: torch.empty(size, dtype=batches[0][name].dtype, device=device) for name, size in sizes.items()}


def fill(static: Tensors, batch: Tensors) -> None:
    """Writes a batch in place; what it leaves over is NaN, or a page out of bounds."""
    for name, to in static.items():
        to.fill_(math.nan if to.is_floating_point() else 0x3FFFFFFF)
        to[tuple(slice(n) for n in batch[name].shape)] = batch[name].to(to.device)


def called(op: str, name: str, static: Tensors, device: torch.device) -> Callable[[], torch.Tensor]:
    """A call of the function, or of one kernel, on these tensors."""
    if name == FUNCTION:
        q, lengths, table, *caches = static.values()
        function = decode_attention if op == "decode_attention" else mla_decode
        return lambda: function(q, *caches, lengths, page_table=table)
    kernel, found = ops.get(op).kernels[name], capability(device)
    assert found is not None
    arch = toolchain.arch_of(found)
    if not kernel.builds_for(arch):
        pytest.skip(f"{kernel.archs} only")
    launch = build.function(kernel, arch)
    q = static["q"]
    out = q.new_empty(q.shape) if op == "decode_attention" else q.new_empty((*q.shape[:3], LATENT))
    more = {"scales": q.new_empty(0, dtype=torch.float32)} if op == "decode_attention" else {}
    call = {} if op == "decode_attention" else {"scale": SCALE}

    def run() -> torch.Tensor:
        launch(out.fill_(math.nan), *static.values(), *more.values(), **call)
        return out

    return run


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "name"), CALLS, ids=[f"{op}-{name}" for op, name in CALLS])
def test_a_captured_graph_stays_right_when_lengths_pages_and_their_order_change_in_place(op: str, name: str) -> None:
    """A replay has the bits of a new launch, so that the division of the work follows the lengths, too."""
    device = pick("cuda")
    made = [batch_of(op, counts) for counts in BATCHES]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        static = room_for([batch for batch, _ in made], device)
        run = called(op, name, static, device)
        fill(static, made[0][0])
        run()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
        for batch, wanted in [*made, *made[::-1]]:
            fill(static, batch)
            graph.replay()
            found = captured.cpu()
            for got, each in zip(found, wanted, strict=True):
                torch.testing.assert_close(got.double(), each, rtol=2e-3, atol=2e-3)
            assert torch.equal(run().cpu(), found)
