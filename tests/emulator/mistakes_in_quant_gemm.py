"""Those of `tests.emulator.mistakes` that are planted in quantised products."""

from __future__ import annotations

from tests.emulator.planting import Edit

WRONG = ""
BROKEN: dict[str, tuple[str, dict[str, Edit], str]] = {
    "the zero of another group": (
        "quant_gemm-v02_gemv",
        {"zero": ("Piece<F>::kGroups + group", "Piece<F>::kGroups + 0")},
        WRONG,
    ),
    "the sums of one part of k for all": ("quant_gemm-v02_gemv", {"split": ("s * (kRows * kMostM)", "0")}, WRONG),
    "the first row's scale for all rows of x": (
        "quant_gemm-v03_mma",
        {"scale_of_row": ("p.x_scales[row]", "p.x_scales[row0]")},
        WRONG,
    ),
    "scales of the first N-slice for all": ("quant_gemm-v06_fp8_one_wave", {"col_of_slice": ("col0", "0")}, WRONG),
    "one row's scale for two": (
        "quant_gemm-v06_fp8_one_wave",
        {"lower_scale": ("g.x_scales[first + 8]", "g.x_scales[first]")},
        WRONG,
    ),
    "sums of x read before they are there": ("quant_gemm-v03_mma", {"arrived": ""}, WRONG),
    "eights of x in the order of memory": (
        "quant_gemm-v07_stream",
        {"order": ("eight % kWords * 4 + eight / kWords", "eight")},
        WRONG,
    ),
    "the scales of the first eight rows for all": (
        "quant_gemm-v07_stream",
        {"row_of_lane": ("high_row", "low_row")},
        WRONG,
    ),
    "x read before all of it is in order": ("quant_gemm-v07_stream", {"ordered": ""}, WRONG),
    "one slice of k in the place of all": ("quant_gemm-v07_stream", {"slices": ("split.slices", "1")}, WRONG),
    "a group of W read before it has arrived": (
        "quant_gemm-v07_stream",
        {"arrived": ""},
        "ends while its cp.async are in flight",
    ),
    "larger blocks than the compiler keeps registers for": (
        "quant_gemm-v07_stream",
        {"bounds": ("32 * kMostWarps", "32")},
        "its __launch_bounds__ allow 32",
    ),
    "sums of a stage that go on in the next one": (
        "quant_gemm-v08_fp8_promoted",
        {"first_step": ("i > 0", "true")},
        WRONG,
    ),
    "one half of the columns for both": ("quant_gemm-v08_fp8_promoted", {"half": ("half", "0")}, WRONG),
    "sums added before the tensor cores have them": (
        "quant_gemm-v12_fp8_fitted",
        {"part_done": ""},
        "ends while its wgmma are in flight",
    ),
    "one slab of columns for two": ("quant_gemm-v12_fp8_fitted", {"slab_of_part": ("w * kOfSlab", "0")}, WRONG),
    "one scale for two rows of a tile": (
        "quant_gemm-v12_fp8_fitted",
        {"scales_of_rows": ("of_rows.y", "of_rows.x")},
        WRONG,
    ),
    "one slab's scales for all": ("quant_gemm-v12_fp8_fitted", {"scales_of_columns": ("w * 64 + own", "own")}, WRONG),
    "scales read before they are there": ("quant_gemm-v12_fp8_fitted", {"scales_there": ""}, WRONG),
    "the scales of one group for two": (
        "quant_gemm-v09_int4_wgmma",
        {"group": ("part * kRowsOfW", "0")},
        WRONG,
    ),
    "packed weights read without their swizzle": (
        "quant_gemm-v09_int4_wgmma",
        {"swizzle_w": ("piece ^ (offset >> 7 & (Stage::kRowW / 16 - 1))", "piece")},
        WRONG,
    ),
    "sums of a tile that go on in the next one": (
        "quant_gemm-v09_int4_wgmma",
        {"first": ("step > place.begin || part > 0 || i > 0", "true")},
        WRONG,
    ),
    "one block's sums for all of a cluster": (
        "quant_gemm-v09_int4_wgmma",
        {"block": ("split + block", "split")},
        WRONG,
    ),
    "a box of y that the tile before still stores": (
        "quant_gemm-v09_int4_wgmma",
        {"stored": ""},
        "changes while TMA stores it",
    ),
    "a box of y stored before all warps have written it": (
        "quant_gemm-v09_int4_wgmma",
        {"box_written": ""},
        "without a fence|while TMA stores it",
    ),
    "eights of x in the order of memory, on their way through registers": (
        "quant_gemm-v10_early",
        {"order": ("piece % 4 * 4 + piece / 4", "piece")},
        WRONG,
    ),
    "the first half's scales for both": ("quant_gemm-v10_early", {"row_of_lane": ("high_row", "low_row")}, WRONG),
    "the second half of a tile 16 rows further": ("quant_gemm-v10_early", {"half": ("kHalf", "kRows")}, WRONG),
    "x multiplied before all of it is in order": ("quant_gemm-v10_early", {"ordered": ""}, WRONG),
    "the sums of one slice of k for all": ("quant_gemm-v10_early", {"slices": ("split.slices", "1")}, WRONG),
    "a group of W multiplied before it has arrived": (
        "quant_gemm-v10_early",
        {"arrived": ""},
        "ends while its cp.async are in flight",
    ),
    "blocks larger than the compiler keeps registers for": (
        "quant_gemm-v10_early",
        {"bounds": ("32 * kMostWarps", "32")},
        "its __launch_bounds__ allow 32",
    ),
}
