"""Kernels whose blocks meet at counters: on many streams at once, and in CUDA graphs that are captured on one stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import minfer
from minfer import ops
from minfer.functional.best import best

Tensor = torch.Tensor
GPU = pytest.mark.gpu
AT_ONCE, REPLAYS, STREAMS, CAPTURES = 4, 50, 70, 200


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def product(m: int, n: int, k: int, layout: str) -> Callable[[], Tensor]:
    a, b = normal(m, k), normal(n, k).t() if layout == "TN" else normal(k, n)
    return lambda: minfer.matmul(a, b)


def decode(batch: int, slots: int) -> Callable[[], Tensor]:
    q, k, v = normal(batch, 1, 32, 128), normal(batch, slots, 8, 128), normal(batch, slots, 8, 128)
    lengths = torch.randint(slots // 2, slots, (batch,), device="cuda", dtype=torch.int32)
    return lambda: minfer.decode_attention(q, k, v, lengths)


def attention(tokens: int) -> Callable[[], Tensor]:
    q, k, v = normal(1, tokens, 16, 128), normal(1, tokens, 4, 128), normal(1, tokens, 4, 128)
    return lambda: minfer.attention(q, k, v, causal=True)


def route(tokens: int) -> Callable[[], tuple[Tensor, ...]]:
    logits = torch.randn(tokens, 128, device="cuda")
    return lambda: minfer.moe_route(logits, 8)


def draw(rows: int, vocab: int) -> Callable[[], Tensor]:
    logits, u = torch.randn(rows, vocab, device="cuda"), torch.rand(rows, device="cuda")
    return lambda: torch.ops.minfer.sample(logits, u, 0.9, 50, 0.95, 0.0)


def packed_product(m: int, n: int, k: int) -> Callable[[], Tensor]:
    x, w = normal(m, k), torch.randint(256, (n, k // 2), device="cuda", dtype=torch.uint8)
    scales, zeros = normal(n, k // 128) * 0.02, torch.randint(16, (n, k // 128), device="cuda").bfloat16()
    return lambda: minfer.quant_gemm(x, w, "int4_g128", scales, zeros)


@dataclass
class Problem:
    """A call on random inputs, and how its op states it."""

    make: Callable[[], Callable[[], Tensor | tuple[Tensor, ...]]]
    op: str
    dtype: str
    shape: tuple[int, ...]
    params: tuple[str, ...] = ()

    def call(self, seed: int) -> Callable[[], list[Tensor]]:
        torch.manual_seed(seed)
        call = self.make()

        def results() -> list[Tensor]:
            found = call()
            return [found] if isinstance(found, Tensor) else list(found)

        return results


PROBLEMS = {
    "matmul": Problem(
        lambda: product(3280, 4096, 4096, "TN"), "hgemm", "bfloat16", (3280, 4096, 4096), ("TN", "float32")
    ),
    "matmul of few rows": Problem(
        lambda: product(16, 4099, 4096, "NN"), "hgemm", "bfloat16", (16, 4099, 4096), ("NN", "float32")
    ),
    "decode_attention": Problem(
        lambda: decode(4, 2048), "decode_attention", "bfloat16", (4, 1, 2048, 32, 8, 128), ("none", "full", "none")
    ),
    "attention": Problem(
        lambda: attention(1024),
        "prefill_attention",
        "bfloat16",
        (1, 1024, 1024, 16, 4, 128),
        ("padded", "full", "no"),
    ),
    "moe_route": Problem(lambda: route(256), "moe_route", "float32", (256, 128, 8)),
    "sample": Problem(lambda: draw(8, 32000), "sample", "float32", (8, 32000)),
    "quant_gemm": Problem(
        lambda: packed_product(16, 1024, 4096),
        "quant_gemm",
        "bfloat16",
        (16, 1024, 4096),
        ("int4_g128", "float32"),
    ),
}


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def captured(call: Callable[[], list[Tensor]], times: int = 1) -> tuple[torch.cuda.CUDAGraph, list[list[Tensor]]]:
    """On the stream of all graphs for which none is given."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, [call() for _ in range(times)]


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_called_has_counters(name: str) -> None:
    problem = PROBLEMS[name]
    op = ops.get(problem.op)
    shape, params = dict(zip(op.axes, problem.shape, strict=False)), dict(zip(op.params, problem.params, strict=False))
    kernel = op.kernels[best(op.name, problem.dtype, params, shape, (9, 0), "NVIDIA H100 80GB HBM3").kernel]
    assert any(path.name == "counters.cuh" for path in kernel.sources())


@GPU
@pytest.mark.parametrize("name", PROBLEMS)
def test_graphs_that_are_captured_on_one_stream_are_replayed_at_once(name: str) -> None:
    calls = [PROBLEMS[name].call(seed) for seed in range(2)]
    wanted = [call() for call in calls]  # compiles
    graphs = [captured(call, AT_ONCE) for call in calls]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(REPLAYS):
        for _, found in graphs:
            for x in itertools.chain(*found):
                x.zero_()
        torch.cuda.synchronize()
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for (_, found), right in zip(graphs, wanted, strict=True):
            assert all(same(each, right) for each in found)


@GPU
@pytest.mark.parametrize("name", PROBLEMS)
def test_calls_run_on_many_streams_at_once(name: str) -> None:
    call = PROBLEMS[name].call(0)
    wanted = call()
    streams = [torch.cuda.Stream(priority=-(i // 32)) for i in range(STREAMS)]  # PyTorch has 32 of each priority
    assert len({stream.cuda_stream for stream in streams}) == STREAMS
    torch.cuda.synchronize()
    found = []
    for stream in streams:
        with torch.cuda.stream(stream):
            found.append(call())
    torch.cuda.synchronize()
    assert all(same(each, wanted) for each in found)


@GPU
def test_a_graph_stays_right_after_many_captures() -> None:
    """Of more captures than one allocation of memory has counters for."""
    calls = [PROBLEMS["decode_attention"].call(seed) for seed in range(2)]
    wanted = [call() for call in calls]
    first, of_first = captured(calls[0])
    for _ in range(CAPTURES):
        last, of_last = captured(calls[1])
    for graph, (found,), right in ((first, of_first, wanted[0]), (last, of_last, wanted[1])):
        for x in found:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert same(found, right)
