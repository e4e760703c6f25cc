"""Chooses which of many similar tests always run; the others are marked `slow`."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations
from typing import TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

from minfer import ops
from minfer.ops import Case, Kernel

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
    """The values of a parameter, or tuples for several parameters. Those that are not `always` tested are marked slow."""
    found = []
    for value in values:
        marks = () if always(value) else pytest.mark.slow
        found.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return found


def is_always_tested(kernel: Kernel) -> bool:
    return f"{kernel.op}-{kernel.source.stem}" in ALWAYS


# Kernels that tests always compile with nvcc, which takes up to 12 s of CPU time each: cp.async and mma.sync, and a kernel for
# rows on both architectures.
COMPILED = {
    ("hgemm-v05_pipelined", "sm_90a"),
    ("rmsnorm-v02_vectors", "sm_89"),
    ("rmsnorm-v02_vectors", "sm_90a"),
}


def is_always_compiled(kernel: Kernel, arch: str) -> bool:
    return (f"{kernel.op}-{kernel.source.stem}", arch) in COMPILED


def is_first_in_cpp(kernel: Kernel) -> bool:
    """Whether a kernel is in the first C++ file of its op, the only one of them that is always compiled."""
    return kernel.source == next(k.source for k in ops.get(kernel.op).kernels.values() if k.backend == "cpp")


def few_of(cases: Sequence[Case], least: int) -> list[Case]:
    """The cases that have a dtype, a value of a parameter or a shape that no case before them has; filled up with others to
    at least `least`."""
    return _that_bring(cases, lambda case: {*_values(case)}, least)


def pairs_of(cases: Sequence[Case], least: int) -> list[Case]:
    """The same for pairs: each value of a parameter with each value of another, each shape with each value, and so on. Most
    mistakes need at most two values (Kuhn, Wallace and Gallo, Software fault interactions, IEEE TSE 30(6), 2004)."""
    shuffled = random.Random(0).sample(cases, len(cases))  # neighbours differ in one value, and so add fewer new pairs
    return _that_bring(shuffled, lambda case: {*combinations(_values(case), 2)}, least)


def _values(case: Case) -> list[object]:
    return [case.dtype, *case.params.items(), case.shape_name]


def _that_bring(cases: Sequence[Case], brings: Callable[[Case], set[object]], least: int) -> list[Case]:
    seen: set[object] = set()
    found, rest = [], []
    for case in cases:
        (rest if brings(case) <= seen else found).append(case)
        seen |= brings(case)
    return [*found, *rest[: max(0, least - len(found))]]


MEASURED_ARCH, OTHER_ARCH = "sm_90a", "sm_89"
# What one architecture may have and another not.
PARTICULAR = re.compile(r"\basm\b|\bMINFER_SM\b|__CUDA_ARCH__|<mma\.h>|<cuda_fp8\.h>|\b__reduce_\w+_sync")


def archs(kernel: Kernel) -> list[str]:
    """What a kernel is compiled for in tests: the architecture that is measured; and an older one, for one file of each set
    of headers with instructions that not every architecture has, and for what is always tested. A compiler that takes such
    a header for one file takes it for all; portable C++ compiles for both or for neither."""
    older = kernel.builds_for(OTHER_ARCH) and (is_always_tested(kernel) or kernel.source in _for_the_other())
    return [*([OTHER_ARCH] if older else []), MEASURED_ARCH]


@cache
def _for_the_other() -> set[object]:
    """The first file with each set of sources that have instructions of their own."""
    found: dict[frozenset[str], object] = {}
    for kernel in ops.every_kernel(["cuda"]):
        if kernel.builds_for(OTHER_ARCH):
            particular = frozenset(str(path) for path in kernel.sources() if PARTICULAR.search(path.read_text()))
            if particular:
                found.setdefault(particular, kernel.source)
    return set(found.values())
