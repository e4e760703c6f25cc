"""The sizes at which tests run an op's kernels. The op's own odd shapes and `Op.sizes` know no kernel; these cross the edges of
tiles, pipelines and blocks. A shape is its sizes in the order of the op's axes."""

from __future__ import annotations

from minfer import ops
from minfer.ops import Kernel, Op
from tests.tiles import EMULATED_TILES_OF_V23, Shapes


def named(op: Op, shapes: Shapes) -> list[dict[str, int]]:
    """The shapes with the names of their axes. One that ends early leaves out axes that have a default."""
    needed = sum(not axis.default for axis in op.axes.values())
    assert all(needed <= len(shape) <= len(op.axes) for shape in shapes)
    return [dict(zip(op.axes, shape, strict=False)) for shape in shapes]


# In the emulator, which has two or three multiprocessors, instead of `Op.sizes`.
EMULATED: dict[str, Shapes] = {
    # Several tiles each way with an edge in each, and longer than a pipeline is deep.
    "hgemm": [(131, 264, 72), (40, 16, 424)],
    # Lone elements, several rows of a lane, of a block at once or in turn, rows in shared memory, wholly or in part.
    "rmsnorm": [
        (3, 1),
        (130, 7),
        (3, 8),
        (3, 33),
        (70, 32),
        (37, 128),
        (21, 256),
        (130, 136),
        (1, 4096),
        (3, 8192),
        (60, 8200),
        (3, 16384),
        (1, 20000),
        (2, 66000),
    ],
    # The same, and rows of each number of blocks in a cluster and of each number of vectors a thread.
    "softmax": [
        (3, 1),
        (130, 7),
        (3, 8),
        (130, 136),
        (2, 4096),
        (7, 8200),
        (1, 20000),
        (2, 66000),
        (1, 140000),
        (1, 272000),
    ],
    # Blocks with several rows.
    "rmsnorm_backward": [(3, 1), (130, 7), (3, 8), (70, 136), (1, 4096), (9, 8192), (2, 16384)],
    # Several tiles for each block.
    "producer_consumer": [(4,), (2048,), (9000,), (60000,)],
    # Several tokens a block, with one left over; more heads than a block has threads for; a place in turn; a rest to copy.
    "rope": [(1, 9, 1, 0, 16, 16), (2, 3, 33, 3, 160, 128), (3, 90, 2, 1, 72, 64), (1, 2, 2, 1, 8208, 8208)],
    # Several tokens a block, with one left over; several places a thread; more heads than a block has; a rest.
    "rope_append": [
        (9, 1, 1, 16, 16),
        (9, 33, 3, 160, 128),
        (70, 2, 1, 72, 64),
        (2, 2, 1, 528, 528),
        (3, 3, 1, 600, 16),
    ],
    # One element, rows of several warps, rows longer than a block keeps, of elements and of vectors.
    "silu_mul_quant": [(2, 1), (3, 136), (1, 2100), (2, 20000)],
    "add_rmsnorm_quant": [(2, 1), (3, 136), (1, 2100), (2, 20000)],
    # Several tiles for each of the emulator's two blocks, more than a ring of stages is deep, and each width of a strip.
    "gated_unit": [(257, 264, 456), (600, 72, 128), (20, 64, 968), (100, 120, 840), (60, 180, 584), (128, 392, 328)],
    # The same.
    "gemm_bias_relu": [(131, 264, 72), (100, 64, 968), (40, 16, 424), (100, 120, 840), (257, 136, 456)],
    # Heads of 5 elements, heads that fill several blocks, numbers of tokens that 8 does not divide, and single tokens.
    "merge_state": [(1, 3, 2, 5), (2, 21, 5, 128), (33, 1, 5, 64), (3, 2, 40, 72)],
    # Several tiles of queries and of keys, with an edge in each, tiles that a warp does not see, more tiles of keys than a
    # ring has stages, and a tile of queries that see no key.
    "prefill_attention": [
        (2, 140, 170, 1, 1, 64),
        (1, 135, 135, 2, 1, 128),
        (1, 66, 90, 1, 1, 256),
        (1, 135, 300, 2, 1, 96),
        (1, 70, 260, 2, 1, 192, 128),
        (1, 66, 90, 1, 1, 192),
        (1, 20, 420, 1, 1, 64),
        (1, 200, 5, 1, 1, 64),
    ],
    # Several tiles of an expert's rows and of columns, with an edge in each, and longer than a pipeline is deep.
    "moe_ffn": [(1, 4, 2, 8, 8), (20, 40, 4, 136, 24), (90, 3, 2, 72, 136), (150, 1, 1, 328, 264)],
    # Several pieces of a block, and a last one that is no multiple of 16 bytes.
    "dequant": [(33, 512), (1, 32), (3, 96), (9, 2304)],
    # Several tiles for each block, k shared by warps and by blocks, more pieces than a ring has stages, and k that are no
    # multiple of any tile.
    "quant_gemm": [(1, 130, 2048), (2, 40, 4096), (5, 17, 6144), (40, 136, 2048), (130, 272, 512)],
    # More units than a ring has stages, parts of an item in several blocks, 32 rows, more rows than a tile.
    "decode_attention": [
        *((2, 3, 170, 6, 1, 128), (1, 8, 300, 5, 1, 64), (3, 1, 400, 4, 1, 256)),
        *((1, 8, 300, 5, 1, 96), (1, 3, 300, 5, 1, 192, 128)),
    ],
    # More units than a ring has stages, parts of an item in several blocks, an odd number of a warpgroup's blocks of keys, and
    # one, two and three tiles of rows, the last of them not whole.
    "mla_decode": [(3, 3, 200, 6), (1, 2, 460, 3), (3, 1, 130, 66), (1, 2, 460, 35), (1, 1, 70, 130)],
}
EMULATED["gemm_bias_gelu"] = EMULATED["gemm_bias_relu"]

HOPPER = [name for name, kernel in ops.get("hgemm").kernels.items() if kernel.archs == "sm_90a"]

# Those of one file more: what takes k apart, and each tile of the kernels that choose one by m.
OF_FILE: dict[str, Shapes] = {
    "hgemm-v15_gemv": [(8, 88, 1416), (5, 24, 8)],
    "hgemm-v07_tuned": [(520, 200, 264)],  # 5 tiles, or 3 of twice the size, for 3 blocks at once
    "hgemm-v08_split_k": [(16, 64, 456)],
    "hgemm-v08_stream_k": [(16, 1800, 40)],  # of 8 tiles, 3 blocks take one each, and 5 are dealt out
    **{f"hgemm-{file}": [(257, 136, 456)] for file in HOPPER},  # several tiles for each of the emulator's two blocks
    "hgemm-v14_stream_k": [
        (1040, 72, 1000),
        (1160, 40, 968),
        (1280, 16, 1032),
    ],  # 5 tiles: one or two of them are shared
    # Each tile, on two multiprocessors, and longer than a ring is deep.
    "hgemm-v14_small": [
        (100, 64, 968),
        (128, 88, 840),
        (200, 120, 520),
        (130, 190, 456),
        (100, 64, 2120),
        (100, 96, 2120),
        (130, 200, 712),
    ],
    "hgemm-v16_skinny": [(8, 88, 1416), (20, 72, 712), (60, 136, 520), (100, 136, 584)],
    "hgemm-v23_mma_fitted": EMULATED_TILES_OF_V23,
    # Rows of odd length, of whole words of 4 bytes, and of whole pieces of 16 bytes; a single row; k in several parts.
    "hgemm-v22_any_size": [(67, 131, 77), (66, 70, 84), (1, 3, 5), (65, 68, 1030), (40, 24, 1096)],
    # One and three groups of 16 rows, k in several parts and a part in several chunks; rows of B narrower than 16 bytes, and a
    # last stripe of one column.
    "hgemm-v20_any_columns": [(1, 121, 2300), (9, 251, 1100), (33, 377, 1270), (16, 3, 40), (2, 8, 9)],
    # Several tiles each way with an edge in each; rows of A, of B and of both that are no whole number of pieces.
    **{
        file: [(67, 131, 77), (130, 40, 67), (65, 67, 72), (1, 3, 5)]
        for file in ("gemm_bias_relu-v06_anywhere", "gemm_bias_gelu-v04_anywhere")
    },
    # Tiles that split columns and tiles that split rows; side by side, one below the other, and two by two; and k in parts;
    # rows that start anywhere.
    "hgemm-v18_fitted": [
        (130, 65, 136),
        (40, 251, 520),
        (87, 120, 72),
        (168, 264, 72),
        (33, 120, 1096),
        (33, 264, 72),
        (321, 64, 72),
        (249, 136, 72),
        (141, 64, 1096),
        (249, 248, 72),
        (123, 504, 72),
        (33, 264, 1096),
        (132, 120, 1096),
        (168, 136, 1096),
        (300, 376, 264),
        (170, 248, 2056),
        (67, 40, 77),
        (70, 35, 84),
        (130, 192, 2056),
    ],
    # The same for two weights, whose tiles have 64 or 128 columns of each.
    "gated_unit-v07_fitted": [
        (130, 64, 136),
        (200, 120, 1096),
        (330, 136, 648),
        (129, 64, 2120),
        (300, 376, 264),
        (410, 128, 136),
        (129, 264, 456),
    ],
    # Each width of N-slice, with an edge: biases are loaded early for narrow ones, and late for wide ones.
    **{
        file: [
            (5, 64, 712),
            (20, 120, 456),
            (60, 200, 328),
            (33, 264, 328),
            (70, 96, 456),
            (100, 200, 328),
            (100, 392, 328),
        ]
        for file in ("gemm_bias_relu-v07_strips", "gemm_bias_gelu-v06_strips")
    },
    "hgemm-v17_one_wave": [
        (5, 64, 2120),
        (8, 88, 1416),
        (20, 120, 1000),
        (60, 200, 968),
        (33, 264, 584),
        (100, 64, 968),
        (70, 96, 712),
        (128, 120, 840),
        (100, 200, 648),
        (100, 392, 584),
        (12, 504, 328),
        (100, 504, 328),
    ],
    # Each width of N-slice, with an edge; several waves of the widest; heights of 80 to 128 rows; an odd number of tiles.
    "hgemm-v21_row_pairs": [
        (130, 64, 712),
        (150, 72, 456),
        (200, 96, 328),
        (256, 120, 328),
        (144, 136, 328),
        (170, 184, 264),
        (129, 200, 264),
        (160, 264, 72),
        (200, 280, 136),
        (256, 440, 72),
        (200, 520, 200),
        (260, 72, 328),
        (384, 120, 136),
        (390, 72, 72),
    ],
    # Several parts of an item, each of more keys than the least.
    "decode_attention-v03_packed": [(1, 2, 400, 4, 1, 128), (1, 1, 1600, 4, 1, 128), (1, 4, 300, 4, 1, 96)],
    # Widths of a tile from 48 to 160 columns, and several tiles of an expert's rows, the last of them not full.
    "moe_ffn-v05_pairs": [
        (94, 1, 1, 72, 24),
        (205, 1, 1, 72, 24),
        (237, 1, 1, 8, 136),
        (270, 1, 1, 40, 8),
        (300, 1, 1, 40, 8),
        (660, 3, 1, 328, 16),
    ],
    # Rows of single elements, in one warp and in several, of which the last has few; three vectors a thread and eight.
    "layernorm-v03_any_width": [(70, 1001), (9, 2304), (3, 20000)],
    # Rows of 1, 16 and 32 lanes; 8 and 32 elements a lane.
    "softmax-v07_short_rows": [(70, 3), (9, 33), (5, 200), (3, 1001)],
    # Rows that start anywhere, and one block for each multiprocessor.
    "softmax-v06_bulk_copies": [(3, 5), (9, 1001), (5, 8201), (2, 66001), (2, 30000)],
    # Four and sixteen heads packed into a tile, and none; one token; rows that a warpgroup alone has; more blocks of keys than
    # a ring has stages.
    "prefill_attention-v07_short": [
        (2, 37, 37, 12, 1, 64),
        (1, 20, 330, 16, 1, 128),
        (2, 1, 65, 3, 1, 64),
        (1, 65, 65, 6, 2, 64),
    ],
    "prefill_attention-v11_paged_short": [
        (2, 37, 37, 12, 1, 64),
        (1, 20, 330, 16, 1, 128),
        (2, 1, 65, 3, 1, 64),
        (1, 65, 65, 6, 2, 64),
    ],
    # Heads of each size, one to sixteen of them in a tile, rings that wrap, and sequences that end within a box.
    "prefill_attention-v08_compact": [
        (2, 37, 37, 12, 1, 64),
        (1, 20, 330, 16, 1, 128),
        (2, 1, 65, 3, 1, 64),
        (1, 65, 65, 6, 2, 64),
        (1, 20, 330, 16, 1, 96),
        (2, 37, 37, 12, 1, 96),
        (2, 20, 200, 8, 1, 192, 128),
        (1, 65, 65, 3, 1, 192, 128),
    ],
    # Three key-value heads, whose rows a block that copies goes through in steps of 8 to 24; several sequences; a window that
    # hides whole blocks of keys; and an item whose keys are in two parts.
    **{
        file: [
            (2, 140, 300, 3, 3, 64),
            (3, 20, 200, 6, 3, 128),
            (2, 70, 330, 3, 3, 96),
            (2, 30, 300, 3, 3, 192, 128),
            (1, 3, 700, 16, 1, 64),
            (1, 70, 900, 1, 1, 128),
        ]
        for file in ("prefill_attention-v15_gathered", "prefill_attention-v16_fp8_gathered")
    },
    # Several tiles for each block, and more pieces of keys and values than the ring has stages.
    "prefill_attention-v13_wide_heads": [
        (1, 140, 300, 2, 1, 256),
        (2, 20, 420, 1, 1, 192),
        (1, 200, 5, 1, 1, 256),
        (1, 140, 300, 2, 1, 192, 128),
    ],
    # An item whose keys are in two parts, of one warpgroup and of two; and as many items as multiprocessors, and more, whose
    # keys are not divided. Of more parts: test_key_parts.py.
    **{
        file: [(1, 3, 700, 16, 1, 64), (1, 70, 900, 1, 1, 128), (2, 5, 600, 1, 1, 64), (1, 65, 65, 6, 2, 64)]
        for file in ("prefill_attention-v14_key_parts", "prefill_attention-v18_paged_parts")
    },
    # A tile whose keys are in two parts, with rows of one warpgroup and of two; and two and four tiles, whose keys are not
    # divided. Of more parts: test_key_parts.py.
    "prefill_attention-v17_wide_parts": [
        (1, 33, 500, 1, 1, 256),
        (1, 100, 600, 1, 1, 192, 128),
        (1, 3, 420, 1, 1, 192),
        (2, 5, 600, 1, 1, 256),
        (1, 140, 300, 2, 1, 192, 128),
    ],
    # One and two tiles of 8 rows of x, a unit of four groups for each warp and several, rows that end within a tile, and more x
    # than a block holds.
    "quant_gemm-v07_stream": [(1, 672, 512), (11, 130, 2048), (16, 40, 1024), (3, 250, 5120), (16, 24, 4096)],
    "quant_gemm-v10_early": [(1, 672, 512), (11, 130, 2048), (16, 40, 1024), (3, 250, 5120), (16, 24, 2048)],
    # Each width of a tile, with an edge, k shared by the blocks of a cluster, and longer than a ring is deep.
    "quant_gemm-v09_int4_wgmma": [
        (20, 16, 4096),
        (90, 264, 640),
        (100, 136, 896),
        (150, 128, 2048),
        (190, 520, 256),
        (210, 264, 512),
        (250, 392, 512),
    ],
    # Each width of N-slice, with an edge; a few rows, and more than 64 (k counts numbers of fp8, of which a step has 128).
    **{
        file: [
            (3, 64, 4352),
            (16, 120, 2048),
            (20, 200, 1280),
            (33, 264, 1280),
            (70, 88, 1536),
            (100, 392, 1024),
        ]
        for file in ("quant_gemm-v06_fp8_one_wave", "quant_gemm-v11_fp8_promoted_slices")
    },
    # One, two and three warpgroups; one and two buffers for a step's sums, with even and odd numbers of steps; a ring that
    # wraps; k in parts; several tiles for a block.
    "quant_gemm-v12_fp8_fitted": [
        (129, 8, 1184),
        (131, 72, 640),
        (163, 136, 1312),
        (247, 136, 96),
        (193, 200, 1216),
        (129, 264, 672),
        (308, 8, 1440),
        (390, 392, 256),
        (40, 56, 2080),
    ],
}


def emulated(kernel: Kernel) -> list[dict[str, int]]:
    """The shapes at which the emulator runs a kernel."""
    op = ops.get(kernel.op)
    longer = named(op, OF_FILE.get(f"{op.name}-{kernel.source.stem}", []))
    own = named(op, EMULATED[kernel.op]) if kernel.op in EMULATED else op.sizes.get("small", [])
    return [*longer, *map(dict, op.odd_shapes), *map(dict, own)]


# Sums of many blocks, long enough for their bits to depend on the order.
SHARED_SUMS = {
    "hgemm-v08_split_k": (128, 256, 392),
    "hgemm-v08_stream_k": (128, 512, 264),
    "hgemm-v09_a_stationary": (128, 128, 1672),
    "hgemm-v16_skinny": (128, 128, 776),
    "hgemm-v14_stream_k": (1280, 16, 1000),
    "hgemm-v18_fitted": (160, 64, 2056),
    "hgemm-v20_any_columns": (16, 77, 1100),
    "hgemm-v22_any_size": (16, 77, 1100),
    "hgemm-v23_mma_fitted": (64, 128, 1416),
}
