"""Is a kernel at least as fast as what PyTorch would run? By what was measured, as `best` decides; nothing is timed here.

`measured.json` holds for each problem by which factor our kernels, PyTorch's functions and torch.compile were faster than
eager PyTorch, cold, in the same rounds; `analysis/make.py fusion` writes it from the rows in `results/`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minfer.functional.best import Entry, distance, sizes
from minfer.ops import DTYPES

TABLE = Path(__file__).with_name("measured.json")
AGAINST = {"inductor": "torch_compile", "eager": "torch"}  # the kernel of the rows that the rest would be
CALLED = {"inductor": "torch.compile", "eager": "eager PyTorch"}
TIE = 0.02  # a kernel that is slower by no more than this is not slower
NEAR = 8.0  # times as large or as small as a problem that was measured: further away nothing is known


@dataclass(frozen=True)
class Verdict:
    """`slower`: it was measured and lost. `unknown`: it was not measured. `why`: as half a sentence."""

    why: str
    slower: bool = False
    unknown: bool = False


@cache
def table() -> Mapping[str, list[Entry]]:
    """What was measured, by op."""
    found: Mapping[str, list[Entry]] = json.loads(TABLE.read_text())
    return found


def compare(
    op: str,
    kernel: str,
    dtype: str,
    params: Mapping[str, str],
    shape: Mapping[str, int],
    capability: tuple[int, int] | None,
    device: str,
    rest: str,
) -> Verdict:
    """A kernel against what `rest` ("inductor" or "eager") makes of the same problem, at the nearest problem (as of
    `best.distance`) that both were measured with, on the same architecture, with elements of the same size, and of sizes
    that differ by no more than the factor NEAR. `device` is the GPU's name, as for `best`."""
    arch = "cpu" if capability is None else f"sm_{capability[0]}{capability[1]}"
    against = AGAINST[rest]
    entries = [
        entry
        for entry in table().get(op, ())
        if entry["arch"].rstrip("af") == arch
        and {kernel, against} <= entry["speedups"].keys()
        and entry["shape"].keys() == shape.keys()
        and DTYPES[entry["dtype"]].itemsize == DTYPES[dtype].itemsize
        and entry["params"].get("call") == params.get("call")
    ]
    near = [entry for entry in entries if _apart(entry["shape"], shape) <= math.log2(NEAR)]
    if not near:
        where = f"near {sizes(shape)}" if entries else f"on {'a CPU' if capability is None else arch}"
        return Verdict(f"its speed {where} was not measured against {CALLED[rest]}", unknown=True)
    entry = min(near, key=lambda entry: distance(entry, dtype, params, shape, capability, device))
    ratio = entry["speedups"][kernel] / entry["speedups"][against]
    same = entry["shape"] == dict(shape)
    about = " ".join([entry["dtype"], *(f"{name}={value}" for name, value in entry["params"].items())])
    where = f"at {'this shape' if same else sizes(entry['shape'])}, {about}, on {entry['device']}"
    return Verdict(f"{ratio:.2f} times as fast as {CALLED[rest]} {where}", slower=ratio < 1 - TIE)


def _apart(measured: Mapping[str, int], shape: Mapping[str, int]) -> float:
    return max(abs(math.log2(measured[axis] or 0.5) - math.log2(size or 0.5)) for axis, size in shape.items())
