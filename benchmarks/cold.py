"""Cold times of several calls, as tile_times.py and kernel_times.py take them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

FLUSHED = 256 << 20  # bytes that are read before each call
Key = TypeVar("Key")


def to_flush(device: torch.device) -> torch.Tensor:
    return torch.zeros(FLUSHED // 4, device=device)


def medians(calls: Mapping[Key, Callable[[], object]], flushed: torch.Tensor, rounds: int) -> dict[Key, float]:
    """The median time of each call in microseconds. Each round has a new order, and `flushed` is read before each call."""
    events: dict[Key, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key in random.sample([*calls], len(calls)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flushed.sum()
            begin.record()
            calls[key]()
            end.record()
            events[key].append((begin, end))
    torch.cuda.synchronize()
    return {key: statistics.median(1000 * x.elapsed_time(y) for x, y in each) for key, each in events.items()}
