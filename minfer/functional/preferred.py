"""Rules that choose a kernel of hgemm for a shape that was not measured, and the kernels that have an entry of their
own.

The rules follow from cold timings of 181 random products of 17 rows or more on an H100."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from minfer.ops import Kernel, get

MULTIPROCESSORS = 132  # of an H100 or H200
SHORT = 512  # the rules say nothing of products with a smaller n or k


def many_columns(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `matmul` takes v14_small for a product: if it has 65 to 128 rows and so many columns that v17_one_wave
    would use its widest slices, of 224 columns, and if these would leave multiprocessors without work. With 111 rows
    and 32000 columns v14_small is 1.17 times as fast as v17_one_wave."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    if not 64 < m <= 128 or k < SHORT or n <= 112 * MULTIPROCESSORS:
        return False
    waves = math.ceil(n / 224) / MULTIPROCESSORS
    return waves / math.ceil(waves) < 0.9


def one_wave(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `matmul` takes v17_one_wave for a product: if it has 17 to 128 rows. At the 64 timed products with so
    many rows v17_one_wave was 0.6 % slower than the fastest of the older kernels in the geometric mean."""
    return 16 < shape["m"] <= 128 and min(shape["n"], shape["k"]) >= SHORT


def off_the_grid(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `matmul` takes v18_fitted for a product. It does so in two cases:

    - n is no multiple of 8, which no other fast kernel supports. In NN the rows of B are then not aligned either, and
      v18_fitted is faster than v03_wmma only from about 256 rows on.
    - The product has at least 129 rows, and v13_cooperative and v14_stream_k would waste work: less than 0.88 of the
      multiprocessors' work (up to 1024 rows, less than 0.96) would go into elements of the product. There the nearest
      measured shape often names a kernel for fewer rows.

    In those kernels, a pair of multiprocessors multiplies a tile of 256 x 256. v14_stream_k divides the tiles that are
    left after the first wave. Dividing costs about a tenth."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    if m == 0 or min(n, k) < SHORT:
        return False
    if n % 8 != 0:
        return params["layout"] == "TN" or m >= 256
    tiles = math.ceil(m / 256) * math.ceil(n / 256)
    waves = tiles / (MULTIPROCESSORS // 2)
    busy = max(waves / math.ceil(waves), 0.9 if waves > 1 else 0)
    return m > 128 and m * n / (tiles * 256 * 256) * busy < (0.96 if m <= 1024 else 0.88)


Rule = Callable[[Mapping[str, int], Mapping[str, str]], bool]  # of a shape and the parameters of the op
# By op and kernel. Of the kernels whose rules hold, the first in the op's order is taken.
PREFERRED: Mapping[tuple[str, str], Rule] = {
    ("hgemm", "v14_small"): many_columns,
    ("hgemm", "v17_one_wave"): one_wave,
    ("hgemm", "v18_fitted"): off_the_grid,
}

# By op and entry: the kernels that register this entry, a second torch op (`library.call_entry`).
ENTRIES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("decode_attention", "scored"): ("v05_scored", "cpu_scored"),
}

# By op: the kernel that `minfer.functional.early` calls, and what follows its symbol in the name of the torch op.
EARLY: Mapping[str, tuple[str, str]] = {
    "hgemm": ("v19_early", "_constant"),
    "gated_unit": ("v06_early", "_constant"),
    "add_rmsnorm": ("v03_early", ""),
    "decode_attention": ("v07_early", ""),
}


def entries(name: str, arch: str) -> list[Kernel]:
    """The kernels of the op `name` that have entries, or are called early, and build for `arch`. If `arch` is empty, those for
    the CPU."""
    found = [each for (op, _), some in ENTRIES.items() if op == name for each in some]
    found += [kernel for op, (kernel, _) in EARLY.items() if op == name]
    kernels = [get(name).kernels[each] for each in found]
    return [x for x in kernels if (x.backend == "cuda" and x.builds_for(arch) if arch else x.backend == "cpp")]
