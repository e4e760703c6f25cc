"""Kernels that choose their tile by a model, and where they are taken for a shape that was not measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from minfer.ops import Kernel, get


def off_the_grid(shape: Mapping[str, int]) -> bool:
    """Whether v18_fitted is taken for a product: from 129 rows on, with n and k from 512 on, where v13_cooperative and
    v14_stream_k would put less than 0.88 of the work of an H100's or H200's multiprocessors into elements of the product.

    A pair of multiprocessors, of which there are 66, multiplies a tile of 256 x 256. v14_stream_k divides the tiles that are
    left after the first wave, which costs about a tenth. At the 124 random products with 129 rows or more that the model of
    v18_fitted was fitted to, this rule and that model together were 1.0 % slower than the best kernel in the geometric mean,
    and 11 % at most."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    if m <= 128 or min(n, k) < 512:
        return False
    tiles = math.ceil(m / 256) * math.ceil(n / 256)
    waves = tiles / 66
    busy = max(waves / math.ceil(waves), 0.9 if waves > 1 else 0)
    return m * n / (tiles * 256 * 256) * busy < 0.88


PREFERRED: Mapping[tuple[str, str], Callable[[Mapping[str, int]], bool]] = {("hgemm", "v18_fitted"): off_the_grid}

# By op and entry: the kernels that have an entry of their own (`library.call_entry`).
ENTRIES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("decode_attention", "scored"): ("v05_scored", "cpu_scored"),
}


def entries(name: str, arch: str) -> list[Kernel]:
    """The kernels of the op `name` that have entries and are for an architecture; for the CPU where it is empty."""
    kernels = [get(name).kernels[each] for (op, _), some in ENTRIES.items() if op == name for each in some]
    return [x for x in kernels if (x.backend == "cuda" and x.builds_for(arch) if arch else x.backend == "cpp")]
