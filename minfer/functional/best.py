"""Which kernel of an op to call: a pure function of the problem and the device, decided by what was measured before.

`best.json` holds, for each problem of each op that was timed, our kernels with their cold times, fastest first;
`analysis/make.py best` writes it from the rows in `results/`. Nothing is timed here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minfer.ops import get

TABLE = Path(__file__).with_name("best.json")
NONE: Mapping[str, str] = MappingProxyType({})
# How far another device of the same architecture is, in doublings of one size. Devices of one architecture run the same code,
# and differ by less than a factor of two in bandwidth, clock and number of multiprocessors. So the size at which one kernel
# overtakes another moves by less than that: a measurement on another device says as much as one on this device at twice the
# size. It comes after the parameters, because another layout or format runs other code.
OTHER_DEVICE = 1.0
# arch ("sm_90a", or "cpu"), device, dtype, params and shape by name, and kernels: name -> cold microseconds
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """A kernel of an op by its name, and why it was chosen, as a phrase."""

    kernel: str
    why: str


@cache
def table() -> Mapping[str, list[Entry]]:
    """What was measured, by op."""
    found: Mapping[str, list[Entry]] = json.loads(TABLE.read_text())
    return found


def best(
    name: str,
    dtype: str,
    params: Mapping[str, str],
    shape: Mapping[str, int],
    capability: tuple[int, int] | None,
    device: str,
    least: Mapping[str, str] = NONE,
) -> Choice:
    """The kernel of the op `name` for a problem.

    `dtype` is a name of `minfer.ops.DTYPES`, `params` and `shape` have all of the op's parameters and axes, `capability` is
    the GPU's, None for the CPU; `device` is the GPU's name, empty where it is not known. Of the kernels that support the
    problem, it is the fastest one at the nearest problem that was measured (`distance`). `least` maps a kernel to an axis:
    the kernel is not chosen if that axis is shorter than in all of its measurements. If none of these kernels was measured,
    it is the last of the ladder that supports the problem. Raises ValueError if no kernel supports it."""
    op = get(name)
    backends = ("cpp",) if capability is None else ("cuda", "triton")
    able = [
        kernel.name
        for kernel in op.kernels.values()
        if kernel.backend in backends
        and kernel.unsupported(op.case(kernel.name, dtype, shape, params), capability) is None
    ]
    if not able:
        where = "a CPU" if capability is None else f"sm_{capability[0]}{capability[1]}"
        raise ValueError(f"no kernel of {name} supports {sizes(shape)} in {dtype} on {where}")
    known = (entry for entry in table().get(name, ()) if entry["shape"].keys() == shape.keys())
    here = [entry for entry in known if (entry["arch"] == "cpu") == (capability is None)]
    short = {
        kernel
        for kernel, axis in least.items()
        if shape[axis] < min((entry["shape"][axis] for entry in here if kernel in entry["kernels"]), default=0)
    }
    for entry in sorted(here, key=lambda entry: distance(entry, dtype, params, shape, capability, device)):
        measured = [kernel for kernel in entry["kernels"] if kernel in able and kernel not in short]
        if measured:
            us, of = entry["kernels"][measured[0]], f"the fastest of {len(measured)}" if measured[1:] else "alone"
            same = entry["shape"] == dict(shape)
            near = "this shape" if same else f"{sizes(entry['shape'])}, the nearest shape measured"
            rest = " ".join([entry["dtype"], *entry["params"].values()])
            return Choice(measured[0], f"{of} at {near}: {us:.4g} us cold, {rest} on {entry['device']}")
    return Choice(able[-1], "the last of the ladder that supports this; no kernel that does was measured")


def sizes(shape: Mapping[str, int]) -> str:
    return "x".join(map(str, shape.values()))


def distance(
    entry: Entry,
    dtype: str,
    params: Mapping[str, str],
    shape: Mapping[str, int],
    capability: tuple[int, int] | None,
    device: str,
) -> tuple[float, ...]:
    """How far a measurement is from a problem: first by architecture, then parameters, then shape and device, then dtype.

    Between shapes it is the Euclidean distance of the logarithms of their sizes, so that 1 to 2 is as far as 2048 to 4096:
    kernels differ by the factor between a size and a tile or a wave. A size of 0 is as far from 1 as 2 is. A measurement
    on another device than `device` is farther by `OTHER_DEVICE`."""
    number = 0 if capability is None else 10 * capability[0] + capability[1]
    arch = 0 if capability is None else abs(int(re.sub(r"\D", "", entry["arch"])) - number)
    other = sum(entry["params"].get(name) != params.get(name) for name in {*entry["params"], *params})
    ours, theirs = ([math.log2(each[axis] or 0.5) for axis in shape] for each in (shape, entry["shape"]))
    apart = math.dist(ours, theirs) + OTHER_DEVICE * (entry["device"] != device)
    return arch, other, apart, entry["dtype"] != dtype
