"""Cold times of several calls, as tile_times.py and kernel_times.py take them."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from minfer.bench.device import pick

FLUSHED = 256 << 20  # bytes that are read before each call
Key = TypeVar("Key")


def find_hopper(program: str) -> torch.device:
    """The GPU; ends the program with a sentence that begins with its name if there is none, or it is no H100 or H200."""
    if not torch.cuda.is_available():
        sys.exit(f"{program} needs a CUDA GPU, and this machine has none")
    device = pick("cuda")
    if torch.cuda.get_device_capability(device) != (9, 0):
        sys.exit(f"{program} needs an H100 or H200, and this GPU is {torch.cuda.get_device_name(device)}")
    return device


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
