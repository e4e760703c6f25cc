"""Kernels that fit their tile to a product, and where they are taken for a shape that was not measured.

The rules were found with cold timings of 181 random products on an H100, of 17 rows or more."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from minfer.ops import Kernel, get

MULTIPROCESSORS = 132  # of an H100 or H200
SHORT = 512  # shorter sizes of n or k have no rule


def many_columns(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether v14_small is taken for a product: from 65 to 128 rows, where v17_one_wave would have to use its widest slices of
    224 columns, and these would leave multiprocessors without work. With 111 rows and 32000 columns it is 1.17 times as fast
    there."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    if not 64 < m <= 128 or k < SHORT or n <= 112 * MULTIPROCESSORS:
        return False
    waves = math.ceil(n / 224) / MULTIPROCESSORS
    return waves / math.ceil(waves) < 0.9


def one_wave(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether v17_one_wave is taken for a product: from 17 to 128 rows. At the 64 products of that height it was 0.6 % slower
    than the fastest of the older kernels in the geometric mean."""
    return 16 < shape["m"] <= 128 and min(shape["n"], shape["k"]) >= SHORT


def off_the_grid(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether v18_fitted is taken for a product: where n is no multiple of 8, which no other fast kernel takes (in NN, where
    rows of B start anywhere, too, it is faster than v03_wmma only from about 256 rows on); and from 129 rows on, where
    v13_cooperative and v14_stream_k would put less than 0.88 of the multiprocessors' work into elements of the product, or up
    to 1024 rows less than 0.96. There the nearest measured shape often names a kernel for fewer rows.

    A pair of multiprocessors multiplies a tile of 256 x 256. v14_stream_k divides the tiles that are left after the first wave,
    which costs about a tenth."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    if min(n, k) < SHORT:
        return False
    if n % 8 != 0:
        return params["layout"] == "TN" or m >= 256
    tiles = math.ceil(m / 256) * math.ceil(n / 256)
    waves = tiles / (MULTIPROCESSORS // 2)
    busy = max(waves / math.ceil(waves), 0.9 if waves > 1 else 0)
    return m > 128 and m * n / (tiles * 256 * 256) * busy < (0.96 if m <= 1024 else 0.88)


Rule = Callable[[Mapping[str, int], Mapping[str, str]], bool]  # of a shape and the parameters of the op
# By op and kernel. The first whose rule holds is taken, in the order of the op's kernels.
PREFERRED: Mapping[tuple[str, str], Rule] = {
    ("hgemm", "v14_small"): many_columns,
    ("hgemm", "v17_one_wave"): one_wave,
    ("hgemm", "v18_fitted"): off_the_grid,
}

# By op and entry: the kernels that have an entry of their own (`library.call_entry`).
ENTRIES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("decode_attention", "scored"): ("v05_scored", "cpu_scored"),
}


def entries(name: str, arch: str) -> list[Kernel]:
    """The kernels of the op `name` that have entries and are for an architecture; for the CPU where it is empty."""
    kernels = [get(name).kernels[each] for (op, _), some in ENTRIES.items() if op == name for each in some]
    return [x for x in kernels if (x.backend == "cuda" and x.builds_for(arch) if arch else x.backend == "cpp")]
