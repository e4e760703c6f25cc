"""The rule of `minfer.functional.best` in a few lines: all measurements sorted by their distance. It takes a millisecond."""

from __future__ import annotations

from collections.abc import Mapping

from minfer.functional.best import Choice, distance, sizes, table
from minfer.ops import get


def best(
    name: str,
    dtype: str,
    params: Mapping[str, str],
    shape: Mapping[str, int],
    capability: tuple[int, int] | None,
    device: str,
) -> Choice:
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
        kernel.name
        for kernel in op.kernels.values()
        if (axis := kernel.least_measured)
        and shape[axis] < min((entry["shape"][axis] for entry in here if kernel.name in entry["kernels"]), default=0)
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
