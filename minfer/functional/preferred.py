"""Rules that choose a kernel for a shape that was not measured, and the kernels that have an entry of their
own.

The rules follow from cold timings of 181 random products of 17 rows or more on an H100."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from minfer.functional.product_times import MULTIPROCESSORS, fastest
from minfer.ops import Kernel, get

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
    """Whether n is no multiple of 8, which of the fast kernels only v18_fitted supports. In NN the rows of B are then not
    aligned either; `matmul` copies B first."""
    return shape["m"] > 0 and min(shape["n"], shape["k"]) >= SHORT and shape["n"] % 8 != 0


def is_fastest(kernel: str, shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether a kernel takes the least time for a product of at least 129 rows, by the models of `product_times.py`."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    if m <= 128 or min(n, k) < SHORT or n % 8 != 0:
        return False
    return fastest(m, n, k, params["layout"] == "TN") == kernel


def rows_of_a_prompt(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether a product that is fused with something has at least 129 rows. There the kernels with slices of N for one
    wave, which the nearest measured row often names, are slow: `swiglu` of 300 x 14336 x 4096 takes 260 us with
    v05_one_wave and 173 with v03_wgmma."""
    return shape["m"] > 128 and min(shape["n"], shape["k"]) >= SHORT


Rule = Callable[[Mapping[str, int], Mapping[str, str]], bool]  # of a shape and the parameters of the op


def any_of(*rules: Rule) -> Rule:
    return lambda shape, params: any(rule(shape, params) for rule in rules)


# By op and kernel. Of the kernels whose rules hold, the first in the op's order is taken.
PREFERRED: Mapping[tuple[str, str], Rule] = {
    ("hgemm", "v14_small"): any_of(many_columns, partial(is_fastest, "v14_small")),
    ("hgemm", "v14_stream_k"): partial(is_fastest, "v14_stream_k"),
    ("hgemm", "v17_one_wave"): one_wave,
    ("gated_unit", "v03_wgmma"): rows_of_a_prompt,
    ("gemm_bias_relu", "v05_fitted"): rows_of_a_prompt,
    ("hgemm", "v18_fitted"): any_of(off_the_grid, partial(is_fastest, "v18_fitted")),
}

# By op and entry: the kernels that register this entry, a second torch op (`library.call_entry`).
ENTRIES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("decode_attention", "scored"): ("v05_scored", "cpu_scored"),
}


def entries(name: str, arch: str) -> list[Kernel]:
    """The kernels of the op `name` that have entries and build for `arch`. If `arch` is empty, those for the CPU."""
    kernels = [get(name).kernels[each] for (op, _), some in ENTRIES.items() if op == name for each in some]
    return [x for x in kernels if (x.backend == "cuda" and x.builds_for(arch) if arch else x.backend == "cpp")]
