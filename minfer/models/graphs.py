"""Replays steps of one token per sequence as CUDA graphs, so that launching a small model's step takes less time than its
kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minfer.models.batch import Batch
from minfer.models.model import Decoder

Tensor = torch.Tensor


def bucket(count: int) -> int:
    """The least power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def can_be_captured(decoder: Decoder) -> bool:
    """Whether a step never waits for the device. `grouped_mm` in `plain.experts` waits for it, except in bfloat16."""
    e = decoder.config.experts
    plain = e is not None and (e.limit > 0 or decoder.dtype == torch.float32)
    return not plain or decoder.dtype == torch.bfloat16


class Graphs:
    """One graph for each bucket of batch sizes and each bucket of pages per sequence, captured when a step first needs it. Rows
    that pad a batch to its bucket have no keys, and their own keys are not written. On a CPU the same padded step runs without
    a graph."""

    def __init__(self, decoder: Decoder, cache: list[tuple[Tensor, ...]], most: int, widest: int) -> None:
        """For at most `most` sequences of at most `widest` pages."""
        self.decoder, self.cache = decoder, cache
        rows, width = bucket(most), bucket(widest)

        def whole(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=decoder.device)

        wide = torch.int64
        self.ids, self.positions, self.where = whole(rows, dtype=wide), whole(rows), whole(rows, dtype=wide)
        self.lengths, self.tables = whole(rows), whole(rows * width)
        self.last = torch.arange(rows, device=decoder.device)
        self.captured: dict[tuple[int, int], Callable[[], Tensor]] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """What `Decoder.forward` gives for a batch of single tokens; it is overwritten by the next call."""
        count, width = batch.table.shape
        rows, pages = bucket(count), bucket(width)
        step = self._batch(rows, pages)
        for static, given, rest in (
            (step.ids, batch.ids, 0),
            (step.positions, batch.positions, 0),
            (step.where, batch.where, -1),
            (step.lengths, batch.lengths, 0),
        ):
            static[:count].copy_(given)
            static[count:].fill_(rest)
        step.table.zero_()[:count, :width].copy_(batch.table)
        if (rows, pages) not in self.captured:
            self.captured[rows, pages] = self._capture(step)
        return self.captured[rows, pages]()[:count]

    def _batch(self, rows: int, pages: int) -> Batch:
        """The first rows of the tensors that graphs read."""
        nothing = self.last[:0]
        table = self.tables[: rows * pages].view(rows, pages)
        return Batch(
            self.ids[:rows], self.positions[:rows], self.where[:rows], self.lengths[:rows], table, self.last[:rows],
            nothing, nothing, nothing, [],
        )  # fmt: skip

    def _capture(self, step: Batch) -> Callable[[], Tensor]:
        def run() -> Tensor:
            return self.decoder.forward(step, self.cache)

        if self.decoder.device.type != "cuda":
            return run
        side = torch.cuda.Stream()  # kernels are chosen and compiled before the capture
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
