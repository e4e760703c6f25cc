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
LEADS = 4  # repeats of a late call, each with twice the lead
LEAD_CYCLES = 2_000_000  # the first lead, for which the GPU waits: about a millisecond
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
    """The median time of each call in microseconds. Each round has a new order, and `flushed` is read before each call. If the
    GPU comes to a call before all of it is in the queue, the time would contain the host's, and the call is repeated after a
    longer wait of the GPU. A call that is late each time ends the program."""
    events: dict[Key, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key in random.sample([*calls], len(calls)):
            events[key].append(_in_time(key, calls[key], flushed))
    torch.cuda.synchronize()
    return {key: statistics.median(1000 * x.elapsed_time(y) for x, y in each) for key, each in events.items()}


def _in_time(
    name: object, call: Callable[[], object], flushed: torch.Tensor
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """The events around a call that was in the queue in time."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for lead in (0, *(LEAD_CYCLES << doubled for doubled in range(LEADS))):
        if lead:
            torch.cuda._sleep(lead)
        flushed.sum()
        begin.record()
        call()
        end.record()
        if not begin.query():
            return begin, end
    sys.exit(f"the host is still in {name} when the GPU's longest wait ends: does {name} wait for the GPU?")
