"""Replays steps of one token per sequence as CUDA graphs, so that launching a small model's step takes less time than its
kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minfer.models.batch import Batch
from minfer.models.model import Decoder

Tensor = torch.Tensor


def can_be_captured(decoder: Decoder) -> bool:
    """Whether a step never waits for the device. `grouped_mm` in `plain.experts` waits for it, except in bfloat16."""
    e = decoder.config.experts
    plain = e is not None and (e.limit > 0 or decoder.dtype == torch.float32)
    return not plain or decoder.dtype == torch.bfloat16


class Graphs:
    """One graph for each bucket of batch sizes and each bucket of pages per sequence, captured when a step first needs it. On a
    CPU the same padded step runs without a graph."""

    def __init__(self, decoder: Decoder, cache: list[tuple[Tensor, ...]]) -> None:
        self.decoder, self.cache = decoder, cache
        # By rows and pages: the tensors that a graph reads, and its replay.
        self.captured: dict[tuple[int, int], tuple[Batch, Callable[[], Tensor]]] = {}

    def __call__(self, step: Batch) -> Tensor:
        """What `Decoder.forward` gives for a padded batch of single tokens; it is overwritten by the next call."""
        rows, width = step.table.shape
        if (rows, width) not in self.captured:
            self.captured[rows, width] = (
                step,
                self._capture(step),
            )  # the graph reads the tensors of the first such batch
        static, replay = self.captured[rows, width]
        if static is not step:
            assert static.packed is not None and step.packed is not None
            static.packed.copy_(step.packed)
        return replay()

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
