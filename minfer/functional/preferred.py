"""Rules that choose a kernel for a shape that was not measured. A kernel's registration names its rule.

Times in microseconds are cold, of an H200 unless another GPU is named. The rules in `OF_PRODUCTS` and `any_size` call
`product_kernel`. It asks the models of `product_times.py` if n and k are at least SHORT. It also asks them if n or k is no
multiple of 8, even below SHORT, where the models were not fitted. The rules in `OF_ATTENTION` ask the models of
`attention_times.py`. The rules in `HOPPER_ONLY` hold on Hopper alone: their kernels run on other GPUs, too, but were not
timed there. A kernel that is registered with a rule `before_hopper` has it on GPUs before Hopper instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

from minfer.functional import attention_times
from minfer.functional.product_times import explained, fastest
from minfer.ops.quantised import INT4

MULTIPROCESSORS = 132  # of an H100 or H200
SHORT = 512  # the models were fitted to products whose n and k are at least this
OF_PRODUCTS = {"pingpong", "small", "stream_k", "gemv", "skinny", "one_wave", "fitted", "any_columns", "row_pairs"}
# `matmul` takes v22_any_size for products with fewer multiply-adds than these. WORDS: v22 can copy words of 4 bytes.
# WORDS_OF_A: it can, and v18_fitted would copy A alone. SINGLE_ELEMENTS: it cannot, and k is even or at most 96.
WORDS, WORDS_OF_A, SINGLE_ELEMENTS = 1_200_000_000, 300_000_000, 200_000_000
SMALL_B = 24_000_000  # elements up to which v15_gemv is faster than v16_skinny, in the mean
HOPPER_ONLY = {"gemv", "skinny", "any_size", "int4_of_two_rows", "int4_of_32_rows", "long_rows", "short_rows", "mma"}
OF_ATTENTION = {
    "mma",
    "in_turns",
    "no_maximum",
    "heads_together",
    "compact",
    "wide_heads",
    "few_tiles",
    "few_wide_tiles",
}
OF_ATTENTION |= {"paged_mma", "boxes", "short_boxes", "gathered", "parts_of_pages", "fp8_mma", "fp8_gathered"}

Rule = Callable[[Mapping[str, int], Mapping[str, str]], bool]  # of a shape and the parameters of the op


def why(rule: str, shape: Mapping[str, int], params: Mapping[str, str]) -> str:
    """What a rule decides by: the models' times, or the rule's name."""
    n, k = shape.get("n", 0), shape.get("k", 0)
    asks = rule in OF_PRODUCTS and (min(n, k) >= SHORT or n % 8 != 0 or k % 8 != 0)
    if asks and (times := explained(shape["m"], shape["n"], shape["k"], params["layout"] == "TN")):
        return f"by models of the times: {times}"
    if rule in OF_ATTENTION:
        return f"by models of the times: {attention_times.explained(_prompts(shape, params), attention_times.how_kept(params))}"
    return f"by a rule, {rule} (minfer/functional/preferred.py)"


@lru_cache(1024)
def product_kernel(m: int, n: int, k: int, is_tn: bool) -> str:
    """The kernel that `matmul` takes for a product that was not measured. An empty name means that of the nearest measured
    shape.

    If n or k is no multiple of 8, it is that of `unaligned_product_kernel`."""
    if m == 0:
        return ""
    if n % 8 != 0 or k % 8 != 0:
        return unaligned_product_kernel(m, n, k, is_tn)
    return short_product_kernel(m, n, k, is_tn) if min(n, k) < SHORT else fastest(m, n, k, is_tn)


def unaligned_product_kernel(m: int, n: int, k: int, is_tn: bool) -> str:
    """The kernel for a product some of whose rows do not start at multiples of 16 bytes. v18_fitted copies operands with such
    rows first, and v20_any_columns reads such a B in NN in place. v22_any_size reads both in place, and is the fastest of
    small products, most often if it can copy words of 4 bytes. At 6,701 random products the choice takes 2.2 % longer in the
    mean than the fastest of the three (benchmarks/kernel_times.py)."""
    found = fastest(m, n, k, is_tn)
    if k % 2 == 0 and (is_tn or n % 2 == 0):
        is_small = m * n * k < (WORDS if is_tn or n % 8 != 0 else WORDS_OF_A)
        return "v22_any_size" if is_small else found
    is_small = m * n * k < SINGLE_ELEMENTS and (k % 2 == 0 or k <= 96)
    return "v22_any_size" if is_small and found != "v20_any_columns" else found


def short_product_kernel(m: int, n: int, k: int, is_tn: bool) -> str:
    """The kernel for a product whose n or k is less than SHORT, as in the router of a mixture of experts or in LoRA. At 2,551
    random products it takes 1.6 % longer in the mean than the fastest of seven kernels (benchmarks/kernel_times.py)."""
    if m <= 8 and is_tn:
        return "v15_gemv"
    if n < SHORT <= k:
        return "v16_skinny" if m <= 32 else "v18_fitted"
    if m <= 128:
        return "v14_small" if n <= 16384 else "v17_one_wave"
    if n < SHORT or math.ceil(m / 128) * math.ceil(n / 192) <= MULTIPROCESSORS:
        return "v14_small"
    if m <= 1024 and math.ceil(m / 128) * math.ceil(n / 256) <= MULTIPROCESSORS:
        return "v21_row_pairs"
    return "v18_fitted" if k <= 16 else "v12_pingpong"


def mma_product_kernel(m: int, n: int, k: int, is_tn: bool) -> str:
    """The kernel that `matmul` takes on a GPU before Hopper for a product that was not measured there, if n and k are
    multiples of 8 and at least SHORT; else an empty name. v23_mma_fitted chooses one of twelve tiles. v15_gemv is faster
    for a small B, and v16_skinny for other products with up to 16 rows. No such GPU was timed. On an H200, at 1,622 random
    products, the choice takes 2.6 % longer in the mean than the fastest of five kernels with mma.sync, and v23_mma_fitted
    alone 3.6 % (benchmarks/kernel_times.py)."""
    if m == 0 or min(n, k) < SHORT or n % 8 != 0 or k % 8 != 0:
        return ""
    if m <= 8 and is_tn and n * k <= SMALL_B:
        return "v15_gemv"
    return "v16_skinny" if m <= 16 else "v23_mma_fitted"


def _takes(kernel: str, choose: Callable[[int, int, int, bool], str] = product_kernel) -> Rule:
    return lambda shape, params: choose(shape["m"], shape["n"], shape["k"], params["layout"] == "TN") == kernel


# Whether `matmul` takes a kernel for a product.
pingpong, small, stream_k = _takes("v12_pingpong"), _takes("v14_small"), _takes("v14_stream_k")
gemv, skinny, one_wave = _takes("v15_gemv"), _takes("v16_skinny"), _takes("v17_one_wave")
fitted, any_columns, row_pairs = _takes("v18_fitted"), _takes("v20_any_columns"), _takes("v21_row_pairs")
any_size = _takes("v22_any_size")
# The same on GPUs before Hopper.
mma_gemv, mma_skinny = _takes("v15_gemv", mma_product_kernel), _takes("v16_skinny", mma_product_kernel)
mma_fitted = _takes("v23_mma_fitted", mma_product_kernel)


def int4_of_two_rows(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `quant_gemm` takes v02_gemv: for one or two rows and int4 weights. 1 x 2560 x 9728 takes 14.6 us with it, and
    27.1 with v07_stream."""
    return params["format"] in INT4 and 0 < shape["m"] <= 2 and min(shape["n"], shape["k"]) >= SHORT


def int4_of_32_rows(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `quant_gemm` takes v03_mma: for up to 32 rows and int4 weights. 4 x 5120 x 25600 takes 36.5 us with it, and 173
    with v07_stream. The latter is faster where all of its blocks run at once and each has 11 to 14 tiles of 16 rows of W:
    16 x 28672 x 4096 takes 30.4 us with it, and 34.0 with v03_mma."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    tiles = math.ceil(n / 16) / MULTIPROCESSORS
    is_one_wave = m <= 16 and k <= 4096 and 10 < tiles <= 14
    return params["format"] in INT4 and 0 < m <= 32 and min(n, k) >= SHORT and not is_one_wave


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


def fp8_slices(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `quant_gemm` takes v11_fp8_promoted_slices for a product with fp8: up to 128 rows. Above 64 rows it takes
    v12_fp8_fitted in two cases: if n is over 25,344 (132 slices of 192), so that v11 needs two waves; or if n is at most 5120
    and k at least 8192, because v12 divides k among blocks. 100 x 25600 x 5120 takes 57.0 us with v11, and 42.0 with v12."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    is_of_v12 = m > 64 and (n > 192 * MULTIPROCESSORS or (n <= 5120 and k >= 8192))
    return up_to_128_rows(shape, params) and not is_of_v12


def fp8_tiles(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `quant_gemm` takes v12_fp8_fitted for a product with fp8: where `fp8_slices` does not take v11. That is from 129
    rows on, and for some products with 65 to 128."""
    return shape["m"] > 0 and min(shape["n"], shape["k"]) >= SHORT and not fp8_slices(shape, params)


def gelu_under_products(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `gemm_bias_gelu` takes v03_pingpong: from 2048 rows and columns on, where k is at most 2560 (and at least 512).
    GELU then takes much of the time, and runs under the products of the other warpgroup: 3997 x 10944 x 2048 takes 267 us, and
    309 with v05_fitted."""
    return shape["m"] >= 2048 and shape["n"] >= 2048 and SHORT <= shape["k"] <= 2560


def any_length(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether n or k is not a multiple of 8, so that some rows do not split into pieces of 16 bytes. Of gemm_bias_gelu's CUDA
    kernels only v04_anywhere takes such products."""
    return shape["n"] % 8 != 0 or shape["k"] % 8 != 0


def long_rows(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `layer_norm` takes v03_any_width: for at least 1.5 million elements in rows whose length is no power of 2, to
    which triton_rows rounds it up. On an H100 5000 x 5120 takes 35.9 us with v03_any_width, 49.4 with triton_rows."""
    tokens, hidden = shape["tokens"], shape["hidden"]
    return hidden > 2048 and hidden & (hidden - 1) != 0 and tokens * hidden >= 1_500_000


def short_rows(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `softmax` takes v07_short_rows: for more than 1024 rows of up to 128 elements. With more than 4096 rows of up to
    32 elements it takes half of triton_rows' time; with up to 512 rows of up to 128 elements, 9 to 14 % longer."""
    return 0 < shape["n"] <= 128 and shape["rows"] > 1024


def longer_keys(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `decode_attention` takes v03_packed: with keys of 192 and values of 128. `best.json` has no times of such heads,
    so without this rule `best` would take the last kernel that supports them, v05_scored or v07_early."""
    return "v_dim" in shape


def _prompts(shape: Mapping[str, int], params: Mapping[str, str]) -> attention_times.Problem:
    """A problem of `attention` as its models take it. They know neither windows nor soft caps, and count both as causal."""
    is_causal = params.get("call", "causal") != "full"
    v_dim = shape.get("v_dim", shape["head_dim"])
    return attention_times.Problem(**{**shape, "v_dim": v_dim}, causal=is_causal)


_asked: tuple[Mapping[str, int], Mapping[str, str], str] = {}, {}, ""  # the last shape and parameters, and the kernel


def attention_kernel(shape: Mapping[str, int], params: Mapping[str, str]) -> str:
    """The kernel with the least time by the models. All rules of `attention` ask for it, one after the other, with the same
    objects, so the last answer is remembered."""
    global _asked
    last_shape, last_params, kernel = _asked
    if last_shape is shape and last_params is params:
        return kernel
    kernel = attention_times.fastest(_prompts(shape, params), kept=attention_times.how_kept(params))
    _asked = shape, params, kernel
    return kernel


def _attends_with(kernel: str) -> Rule:
    return lambda shape, params: attention_kernel(shape, params) == kernel


# Whether `attention` takes a kernel: keys and values side by side, in q's dtype;
mma, in_turns, no_maximum = _attends_with("v03_mma"), _attends_with("v05_pingpong"), _attends_with("v06_no_maximum")
heads_together, compact = _attends_with("v07_short"), _attends_with("v08_compact")
wide_heads, few_tiles = _attends_with("v13_wide_heads"), _attends_with("v14_key_parts")
few_wide_tiles = _attends_with("v17_wide_parts")
# in pages, or in fp8.
paged_mma, boxes, short_boxes = (
    _attends_with("v09_paged"),
    _attends_with("v10_paged_boxes"),
    _attends_with("v11_paged_short"),
)
gathered, parts_of_pages = _attends_with("v15_gathered"), _attends_with("v18_paged_parts")
fp8_mma, fp8_gathered = _attends_with("v12_fp8"), _attends_with("v16_fp8_gathered")


def before_hopper(shape: Mapping[str, int], params: Mapping[str, str]) -> bool:
    """Whether `attention` takes v03_mma on GPUs before Hopper: yes, at every shape that was not measured. Nothing was timed
    there, and triton_flash's times on an H200 are of wgmma, which those GPUs lack."""
    return True
