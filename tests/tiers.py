"""Which of many of a kind are always tested; the others are `slow`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

from minfer.ops import Kernel

T = TypeVar("T")

# Files with CUDA kernels, one of each way to multiply or to share work.
ALWAYS = {
    "hgemm-v02_tiled",  # shared memory
    "hgemm-v05_pipelined",  # cp.async and mma.sync
    "hgemm-v08_stream_k",  # sums of several blocks
    "hgemm-v13_cooperative",  # TMA, wgmma, clusters
    "rmsnorm-v02_vectors",
}


def mostly_slow(values: Iterable[T], always: Callable[[T], bool]) -> list[ParameterSet]:
    """The values of a parameter, or tuples of several's, of which only some are always tested."""
    found = []
    for value in values:
        marks = () if always(value) else pytest.mark.slow
        found.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return found


def is_always_tested(kernel: Kernel) -> bool:
    return f"{kernel.op}-{kernel.source.stem}" in ALWAYS
