"""Weights that stay in host memory: what does it cost to copy each before it is used? `python benchmarks/transfer.py`

    uv run python benchmarks/transfer.py       # needs a GPU and 2 GB of host memory; half a minute; writes benchmarks/results/

Eight weights are copied to the GPU one after the other, and each is multiplied by activations of so many tokens: from pageable
and from pinned memory, one after the other in one stream, and in two streams, where the next weight is copied while the last
one is multiplied. Beside it the copies alone and the products alone. All are timed in shuffled rounds, by events of the GPU,
and by the host's clock until all is enqueued. What was multiplied is compared with the product of resident weights.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.rows import write
from minfer.bench import device as devices

LAYERS, IN, OUT = 8, 4096, 14336  # 117 MB each, in half precision
TOKENS = (1, 1024, 8192, 16384)
ROUNDS = 15


@dataclass(frozen=True)
class Mode:
    """Where weights come from ("device": they are there), whether they are multiplied, and in how many streams."""

    name: str
    memory: str
    multiplies: bool = True
    streams: int = 1


MODES = (
    Mode("products alone", "device"),
    Mode("copies alone, pageable", "pageable", multiplies=False),
    Mode("copies alone, pinned", "pinned", multiplies=False),
    Mode("one stream, pageable", "pageable"),
    Mode("one stream, pinned", "pinned"),
    Mode("two streams, pageable", "pageable", streams=2),
    Mode("two streams, pinned", "pinned", streams=2),
)


class Layers:
    """The weights in each kind of memory, two places for them on the GPU, and the activations."""

    def __init__(self, device: torch.device) -> None:
        drawn = [torch.randn(IN, OUT, device=device, dtype=torch.float16) * IN**-0.5 for _ in range(LAYERS)]
        self.weights = {
            "device": drawn,
            "pageable": [weight.cpu() for weight in drawn],
            "pinned": [weight.cpu().pin_memory() for weight in drawn],
        }
        self.places = [torch.empty_like(drawn[0]) for _ in range(2)]
        self.copies, self.x, self.y = torch.cuda.Stream(device), torch.empty(0), torch.empty(0)

    def tokens(self, count: int) -> None:
        """Activations for so many tokens, and a place for each layer's result."""
        device = self.places[0].device
        self.x = torch.randn(count, IN, device=device, dtype=torch.float16)
        self.y = torch.empty(LAYERS, count, OUT, device=device, dtype=torch.float16)

    def run(self, mode: Mode) -> None:
        """Enqueue all layers. With two streams a copy waits until the product before the last has read its place, and a
        product until its weight is there."""
        products = torch.cuda.current_stream()
        copies = self.copies if mode.streams == 2 else products
        copies.wait_stream(products)
        read: list[torch.cuda.Event] = []
        for layer, source in enumerate(self.weights[mode.memory]):
            weight = source
            if mode.memory != "device":
                weight = self.places[layer % 2]
                with torch.cuda.stream(copies):
                    if layer >= 2 and mode.streams == 2:
                        copies.wait_event(read[layer - 2])
                    weight.copy_(source, non_blocking=True)
                    products.wait_event(copies.record_event())
            if mode.multiplies:
                torch.mm(self.x, weight, out=self.y[layer])
            read.append(products.record_event())
        products.wait_stream(copies)


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds on the GPU, from an idle one to the end, and until the host had enqueued it all."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    clock = time.perf_counter()
    begin.record()
    run()
    end.record()
    enqueued = time.perf_counter() - clock
    torch.cuda.synchronize()
    return begin.elapsed_time(end), 1e3 * enqueued


def measured(layers: Layers, tokens: int, rng: random.Random) -> list[dict[str, Any]]:
    """A row for each mode. Raises RuntimeError where a product is not that of the resident weights."""
    layers.tokens(tokens)
    samples: dict[Mode, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    layers.run(MODES[0])
    right = layers.y.clone()
    for mode in MODES:
        layers.y.fill_(float("nan"))
        layers.run(mode)
        if mode.multiplies and not torch.equal(layers.y, right):
            raise RuntimeError(f"{mode.name}, {tokens} tokens: a product is not that of the resident weights")
    for _ in range(ROUNDS):
        for mode in rng.sample(MODES, len(MODES)):
            samples[mode].append(timed(lambda mode=mode: layers.run(mode)))  # type: ignore[misc]
    return [
        {
            "mode": mode.name, "tokens": tokens, "layers": LAYERS, "bytes": 2 * IN * OUT, "flops": 2.0 * tokens * IN * OUT,
            "ms": [ms for ms, _ in found], "host_ms": [host for _, host in found],
        }
        for mode, found in samples.items()
    ]  # fmt: skip


def main() -> int:
    if why := devices.no_gpu():
        sys.exit(f"transfer.py needs a GPU: {why}")
    device, rng = devices.pick("cuda"), random.Random(0)
    layers, rows = Layers(device), []
    for tokens in TOKENS:
        rows += measured(layers, tokens, rng)
        for row in rows[-len(MODES) :]:
            ms, host = float(np.median(row["ms"])), float(np.median(row["host_ms"]))
            print(f"{tokens:6} tokens  {row['mode']:26} {ms:8.3f} ms, {host:8.3f} until enqueued")
    write("transfer", rows, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
