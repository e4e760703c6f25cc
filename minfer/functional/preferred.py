"""Rules that choose a kernel for a shape that was not measured. A kernel's registration names its rule.

`many_columns` and `one_wave` follow from cold timings of 181 random products of 17 rows or more on an H100. `fitted`,
`stream_k` and `any_columns` ask the models of `product_times.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from minfer.functional.product_times import MULTIPROCESSORS, fastest

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


def fitted(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `matmul` takes v18_fitted: from 129 rows on where v14_stream_k is not faster, and where n is no multiple of 8,
    which of the fast kernels only v18_fitted supports. In NN the rows of B are then not aligned either; `matmul` copies B
    first, where v20_any_columns is not faster."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    if m == 0 or min(n, k) < SHORT or any_columns(shape, params):
        return False
    return n % 8 != 0 or (m > 128 and not stream_k(shape, params))


def stream_k(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `matmul` takes v14_stream_k for a product of at least 129 rows: where its tiles fill all multiprocessors at
    least once, and the models say that it is faster than v18_fitted."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    tiles = math.ceil(m / 256) * math.ceil(n / 256)
    if m <= 128 or tiles < MULTIPROCESSORS // 2 or min(n, k) < SHORT or n % 8 != 0:
        return False
    return fastest(m, n, k, params["layout"] == "TN") == "v14_stream_k"


def any_columns(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `matmul` takes v20_any_columns for a product of up to 64 rows: where n is no multiple of 8, in NN, and the model
    says that it is faster than v18_fitted with the copy that this needs."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    if not 0 < m <= 64 or n % 8 == 0 or min(n, k) < SHORT or params["layout"] != "NN":
        return False
    return fastest(m, n, k, False) == "v20_any_columns"


def more_than_32_rows(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether a product with int4 weights has more than 32 rows: on an H200 723 x 2048 x 8192 took 189 us with v03_mma, the
    nearest shape's kernel."""
    return shape["m"] > 32 and min(shape["n"], shape["k"]) >= SHORT


def rows_of_a_prompt(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether a product has at least 129 rows. There the kernels with N-slices for one wave, which the nearest measured row
    often names, are slow: on an H200 `swiglu` of 271 x 11008 x 4096 takes 147 us with v05_one_wave, 86 with v07_fitted."""
    return shape["m"] > 128 and min(shape["n"], shape["k"]) >= SHORT


def up_to_128_rows(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether a product has at most 128 rows, but not none. The nearest measured row often has thousands: on an
    H200 `gemm_bias_relu` of 12 x 17408 x 5120 took 143 us with v04_cooperative, and cuBLASLt 50 us."""
    return 0 < shape["m"] <= 128 and min(shape["n"], shape["k"]) >= SHORT


def any_length(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether n or k is not a multiple of 8, so that some rows do not split into pieces of 16 bytes. Of gemm_bias_gelu's CUDA
    kernels only v04_anywhere takes such products."""
    return shape["n"] % 8 != 0 or shape["k"] % 8 != 0
