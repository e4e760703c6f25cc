"""Which kernel multiplies: a pure function of the problem and the device, decided by what was measured before.

`best.json` holds, for each shape that was timed, our kernels with their cold times, fastest first;
`analysis/make_best.py` writes it from the rows in `results/`. Nothing is timed here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from minfer.ops import get

TABLE = Path(__file__).with_name("best.json")
# Not taken for fewer columns than any that were measured: strips of them leave multiprocessors idle there.
STRIPS = {"v17_one_wave"}
# arch ("sm_90a", or "cpu"), device, dtype, layout, m, n, k, and kernels: name -> cold microseconds
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """A kernel of hgemm by its name, and why it was chosen, as half a sentence."""

    kernel: str
    why: str


@cache
def table() -> tuple[Entry, ...]:
    """What was measured."""
    return tuple(json.loads(TABLE.read_text()))


@cache
def best(m: int, n: int, k: int, dtype: str, layout: str, capability: tuple[int, int] | None) -> Choice:
    """The kernel to multiply an (m, k) by a (k, n) matrix with, fp32 accumulate.

    `dtype` is a name of `minfer.ops.DTYPES`, `layout` "TN" or "NN", `capability` the GPU's, None for the CPU. It is the
    fastest kernel at the nearest shape that was measured (`distance`) of those that support this one, but for `STRIPS`.
    Where nothing was measured it is the last of the ladder that does. Raises ValueError where no kernel does."""
    op = get("hgemm")
    problem = {"m": m, "n": n, "k": k}
    backends = ("cpp",) if capability is None else ("cuda", "triton")
    params = {"layout": layout, "accumulate": "float32"}
    able = [
        kernel.name
        for kernel in op.kernels.values()
        if kernel.backend in backends
        and kernel.unsupported(op.case(kernel.name, dtype, problem, params), capability) is None
    ]
    if not able:
        where = "a CPU" if capability is None else f"sm_{capability[0]}{capability[1]}"
        raise ValueError(f"no kernel of hgemm multiplies {m}x{n}x{k} in {dtype} on {where}")
    here = [entry for entry in table() if (entry["arch"] == "cpu") == (capability is None)]
    narrow = {name for name in STRIPS if n < min((entry["n"] for entry in here if name in entry["kernels"]), default=0)}
    for entry in sorted(here, key=lambda entry: distance(entry, problem, dtype, layout, capability)):
        measured = [name for name in entry["kernels"] if name in able and name not in narrow]
        if measured:
            shape = "x".join(str(entry[axis]) for axis in problem)
            us, of = entry["kernels"][measured[0]], f"the fastest of {len(measured)}" if measured[1:] else "alone"
            near = "this shape" if problem == {a: entry[a] for a in problem} else f"{shape}, the nearest shape measured"
            rest = f"{entry['dtype']} {entry['layout']} on {entry['device']}"
            return Choice(measured[0], f"{of} at {near}: {us:.4g} us cold, {rest}")
    return Choice(able[-1], "the last of the ladder that supports this; no kernel that does was measured")


def distance(
    entry: Entry, problem: Mapping[str, int], dtype: str, layout: str, capability: tuple[int, int] | None
) -> tuple[float, ...]:
    """How far a measurement is from a problem: first by architecture, then layout, then shape, then dtype.

    Between shapes it is the Euclidean distance of the logarithms of their sizes, so that 1 to 2 is as far as 2048 to
    4096: what makes kernels differ is by which factor a size is above or below a tile or a wave."""
    number = 0 if capability is None else 10 * capability[0] + capability[1]
    arch = 0 if capability is None else abs(int(re.sub(r"\D", "", entry["arch"])) - number)
    apart = math.dist([math.log2(entry[axis]) for axis in problem], [math.log2(size) for size in problem.values()])
    return arch, entry["layout"] != layout, apart, entry["dtype"] != dtype
