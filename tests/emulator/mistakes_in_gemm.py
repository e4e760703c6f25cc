"""Those of `tests.emulator.mistakes` that are planted in products of matrices."""

from __future__ import annotations

from tests.emulator.planting import IF_FALSE, IF_TRUE, Edit

WRONG = ""
BROKEN: dict[str, tuple[str, dict[str, Edit], str]] = {
    "wrong index": ("hgemm-v02_tiled", {"index": ("b_tile[k][x]", "b_tile[x][k]")}, WRONG),
    "a stage stored before all have read it": ("sgemm-v05_register_tiles", {"stage_read": ""}, WRONG),
    "no barrier after the load": ("hgemm-v02_tiled", {"loaded": ""}, WRONG),
    "no barrier before the next load": ("hgemm-v02_tiled", {"multiplied": ""}, WRONG),
    "edge in M not checked": (
        "hgemm-v02_tiled",
        {"edge_m": ("row0 + y < g.m", "true"), "edge_of_result": ("row0 + y >= g.m", "false")},
        "outside operand",
    ),
    "B not transposed": ("hgemm-v04_mma", {"transposed": ("ldmatrix_x4_trans", "ldmatrix_x4")}, WRONG),
    "rows of A beyond the edge": ("hgemm-v04_mma", {"edge_a": ("row0 + r < rows", "true")}, "outside operand"),
    "waits for one group too few": (
        "hgemm-v05_pipelined",
        {"stage_arrived": ("cp_async_wait<kStages - 2>()", "cp_async_wait<kStages - 1>()")},
        "in flight",
    ),
    "no barrier before a stage is read": ("hgemm-v05_pipelined", {"stage_read": ""}, WRONG),
    "copies beyond the edge": (
        "hgemm-v05_pipelined",
        {"edge_copies": ("cols_left > 0", "true")},
        "outside the operands",
    ),
    "swizzled when written only": (
        "hgemm-v06_swizzled",
        {
            "a_place": (
                "Place::at(row + i * 16 + lane % 16, k + lane / 16 * 8)",
                "Padded<24>::at(row + i * 16 + lane % 16, k + lane / 16 * 8)",
            )
        },
        WRONG,
    ),
    "no barrier before a stage is filled": ("hgemm-v06_swizzled", {"before_refill": ""}, WRONG),
    "a row of A that is not there": (
        "hgemm-v15_gemv",
        {"row_of_a8": ("lane / 4 < g.m", "true"), "row_of_a4": ("lane / 4 < g.m", "true")},
        "outside operand",
    ),
    "sums of warps not waited for": ("hgemm-v15_gemv", {"sums_there": ""}, WRONG),
    "columns of a product swapped": (
        "hgemm-v15_gemv",
        {"column": ("2 * product + upper", "2 * product + 1 - upper")},
        WRONG,
    ),
    "no zeros behind the end of k": (
        "hgemm-v20_any_columns",
        {"zeros_of_a": ("k + j < to", "true")},
        "outside operand",
    ),
    "no products at the last row's end": ("hgemm-v20_any_columns", {"last_rows": ("k < g.k", "k < 0")}, WRONG),
    "words where rows start at odd elements": (
        "hgemm-v22_any_size",
        {"by_words": ("ld % 2 == 0 && cols % 2 == 0", "true")},
        "an address is no multiple",
    ),
    "words behind the last row": (
        "hgemm-v22_any_size",
        {"inside": ("i * kRowStep < rows_left && cols_left > 0", "cols_left > 0")},
        "outside",
    ),
    "an element behind the end of a row": ("hgemm-v22_any_size", {"second": ("cols_left > 1", "true")}, WRONG),
    "a column behind the last": ("hgemm-v22_any_size", {"last_column": ("left > 1", "true")}, "outside operand"),
    "rows of A not waited for": ("hgemm-v20_any_columns", {"a_there": ""}, WRONG),
    "pieces beyond B": (
        "hgemm-v20_any_columns",
        {"inside": ("piece >= begin && piece + 8 <= end", "true")},
        "outside the operands",
    ),
    "sums written over A": ("hgemm-v20_any_columns", {"shared_is_free": ""}, WRONG),
    "sums of shifted columns": ("hgemm-v20_any_columns", {"shifted": ("col + shifts[k]", "col")}, WRONG),
    "parts added up before all have come": (
        "hgemm-v20_any_columns",
        {
            "last_part": (
                "atomicInc(counters + tile, splits - 1) == splits - 1",
                "atomicInc(counters + tile, splits - 1) == 0",
            )
        },
        WRONG,
    ),
    "added up before all have come": (
        "hgemm-v16_skinny",
        {"last_block": ("atomicInc(arrived, count - 1) == count - 1", "atomicInc(arrived, count - 1) == 0")},
        WRONG,
    ),
    "sums at another block's place": ("hgemm-v08_stream_k", {"place_of_sums": ("second", "0")}, WRONG),
    "a step of another tile": ("hgemm-v08_stream_k", {"step_of_tile": ("step - dealt * k_tiles", "0")}, WRONG),
    "a tile twice": ("hgemm-v07_tuned", {"tile_order": ("within / rows", "within % rows")}, WRONG),
    "rows staged where another warp does": (
        "hgemm-v07_tuned",
        {"staged_rows": ("stages + threadIdx.x / 32 * Block::Warp::kStaged", "stages")},
        WRONG,
    ),
    "rows copied behind those of a tile": (
        "hgemm-v23_mma_fitted",
        {"rest_of_rows": ("threadIdx.x / kPieces < kRest", "true")},
        WRONG,
    ),
    "rows staged where another warp does, in tiles of many sizes": (
        "hgemm-v23_mma_fitted",
        {"staged_rows": ("stages + threadIdx.x / 32 * Block::Warp::kStaged", "stages")},
        WRONG,
    ),
    "no wait for a full stage": ("hgemm-v10_wgmma", {"full": "", "full_stage": ""}, "changed while wgmma read it"),
    "a stage released while products read it": (
        "hgemm-v11_specialised",
        {"release": "release(ring.stage);"},
        "changed while wgmma read it",
    ),
    "no turns": ("hgemm-v12_pingpong", {"turn": ""}, "changed while|more often"),
    "the phases of the other's tile not skipped": ("hgemm-v12_pingpong", {"skip": ""}, "wait for ever"),
    "no fence before a TMA store": ("hgemm-v13_cooperative", {"fence_box": ""}, "without a fence since"),
    "a box filled while TMA reads it": (
        "hgemm-v13_cooperative",
        {"box_stored": ("tma_store_wait<kPending>()", "tma_store_wait<kPending + 1>()")},
        "changes while TMA stores it",
    ),
    "a box of two filled while TMA reads it": (
        "hgemm-v12_pingpong",
        {"box_stored": ("tma_store_wait<kPending>()", "tma_store_wait<kPending + 1>()")},
        "changes while TMA stores it",
    ),
    "a stage released in one block of the cluster": (
        "hgemm-v13_cooperative",
        {"blocks_of_cluster": ("if (…)", "threadIdx.x % 32 == 0")},
        "wait for ever at an mbarrier",
    ),
    "a block that does not wait for its cluster": (
        "hgemm-v13_cooperative",
        {"cluster_end": ""},
        "a block that has ended",
    ),
    "a stage shared by a cluster, released while products read it": (
        "hgemm-v12_pingpong",
        {"release": "release(ring.stage);", "release_last": ""},
        "changed while wgmma read it",
    ),
    "sums that are said to be there too early": ("hgemm-v14_stream_k", {"flag_after": "", "sums_written": ""}, WRONG),
    "a helper's sums where another's are": (
        "hgemm-v14_stream_k",
        {"helper": ("helper", "0")},
        "nobody has taken down|wait for ever",
    ),
    "sums added before they have come": ("hgemm-v14_stream_k", {"sums_arrived": ""}, "changed while"),
    "others' sums copied without a fence": (
        "hgemm-v14_stream_k",
        {"fence_global": ""},
        "what others wrote without a fence",
    ),
    "half of B not copied to the other block": (
        "hgemm-v14_small",
        {"multicast": ("(1 << kCluster) - 1", "1 << rank")},
        "wait for ever at an mbarrier",
    ),
    "copies to a block whose barriers are not there": (
        "hgemm-v14_small",
        {"barriers_there": "__syncthreads();"},
        "not initialised|has ended",
    ),
    "a tile that leaves through stages that are read": (
        "hgemm-v14_small",
        {"stages_read": ""},
        "changed while wgmma read it",
    ),
    "boxes of two warpgroups at one place": (
        "hgemm-v14_small",
        {"boxes": ("warpgroup", "1")},
        "changes while TMA stores it|without a fence since",
    ),
    "the columns of the other warpgroup": ("hgemm-v14_small", {"columns": ("col * kBlockK", "0")}, WRONG),
    "rows waited for that are not copied": (
        "hgemm-v17_one_wave",
        {"rows_copied": ("Shape::rows(g.m)", "Tiles::kA / kBlockK")},
        "wait for ever at an mbarrier",
    ),
    "as many rows waited for as a higher tile has": (
        "hgemm-v21_row_pairs",
        {"even_copied": ("high", "Shape::kM")},
        "wait for ever at an mbarrier",
    ),
    "rows of the next tile stored": ("hgemm-v21_row_pairs", {"even_stored": ("high", "Shape::kM")}, WRONG),
    "a box that is not swizzled, written as if": (
        "hgemm-v17_one_wave",
        {"swizzle": ("kBoxN == 64", "true")},
        "changes while TMA stores it|without a fence since",
    ),
    "a product beyond shared memory": (
        "hgemm-v17_one_wave",
        {"steps": ("(kTN ? 2 : 128)", "4096")},
        "operand is outside shared memory",
    ),
    "steps of a transposed operand as of the other": ("hgemm-v17_one_wave", {"steps": ("(kTN ? 2 : 128)", "2")}, WRONG),
    "an operand that is not transposed": (
        "hgemm-v17_one_wave",
        {
            "steps": (
                "wgmma<In, false>(sums[i], rows + i * (kSlab * sizeof(In) / 16) "
                "+ step * 2, cols + step * 2, !first || step > 0);"
            )
        },
        WRONG,
    ),
    "half of A not copied to the other block": (
        "hgemm-v18_fitted",
        {"to_both": ("(1 << group.across) - 1 << rank - x_in_group", "1 << rank")},
        "wait for ever at an mbarrier",
    ),
    "half of B not copied to the block below": (
        "hgemm-v18_fitted",
        {"to_column": ("(group.down > 1 ? 1 << group.across | 1 : 1) << first + x_in_group", "1 << rank")},
        "wait for ever at an mbarrier",
    ),
    "the first weight in place of the second": (
        "gated_unit-v07_fitted",
        {"map_of_b": ("(Of::kTwo ? second : fewer_columns) ? maps.b_other : maps.b", "maps.b")},
        WRONG,
    ),
    "rows outside of A copied where they are not expected": (
        "hgemm-v18_fitted",
        {"map_of_last_rows": ("rows.size == Of::kM ? maps.a : maps.a_last", "maps.a")},
        "wait for ever at an mbarrier",
    ),
    "rows outside of A copied to a pair of blocks where they are not expected": (
        "hgemm-v13_cooperative",
        {"rows_inside": ("rows == kBlockM ? maps.a : maps.a_last", "maps.a")},
        "wait for ever at an mbarrier",
    ),
    "columns outside of B copied to a pair of blocks where they are not expected": (
        "hgemm-v13_cooperative",
        {"columns_inside": ("!kTN || mine >= kPart ? maps.b : maps.b_last", "maps.b")},
        "wait for ever at an mbarrier",
    ),
    "sums gated the other way round": (
        "gated_unit-v07_fitted",
        {"gate": ("gated(h1 + first[i], h2 + second[i], silu)", "gated(h2 + second[i], h1 + first[i], silu)")},
        WRONG,
    ),
    "the biases of columns that come before": (
        "gemm_bias_gelu-v06_strips",
        {"late_biases": ("col0 + j * 32", "col0")},
        WRONG,
    ),
    "partial sums over stages that are read": ("hgemm-v18_fitted", {"all_read": ""}, "changed while wgmma read it"),
    "others' partial sums read too early": ("hgemm-v18_fitted", {"partial_there": ""}, "wait for ever"),
    "a box not swizzled": (
        "hgemm-v18_fitted",
        {"place_in_box": ("piece ^ lane % 8", "piece")},
        WRONG,
    ),
    "no fence before TMA stores a box of the tile": (
        "hgemm-v18_fitted",
        {"fence_of_box": ""},
        "without a fence since",
    ),
    "a box of the tile filled while TMA stores it": (
        "hgemm-v18_fitted",
        {"box_read": ""},
        "changes while TMA stores it",
    ),
    "a box of the tile stored before all warps have written it": (
        "hgemm-v18_fitted",
        {"box_written": ""},
        "without a fence|while TMA stores it",
    ),
    "a box read before all of its columns are there": ("hgemm-v18_fitted", {"box_there": ""}, WRONG),
    "pairs of columns at odd places": (
        "hgemm-v18_fitted",
        {"odd_row": ("2 * lane + odd", "2 * lane")},
        "misaligned access",
    ),
    "more elements copied than a row has": (
        "hgemm-v18_fitted",
        {"end_of_row": ("i < left", "true")},
        "outside operand",
    ),
    "elements of two words not joined": (
        "hgemm-v18_fitted",
        {"shifted": ("before >> 16 | next << 16", "next")},
        WRONG,
    ),
    "rows of B not copied": ("hgemm-v18_fitted", {"pieces_of_b": ("index - a.count < b.count", "false")}, WRONG),
    "steps of a slab as of rows": ("hgemm-v18_fitted", {"of_slab": ("(Of::kTN ? 2 : 128)", "2")}, WRONG),
    "a stage of a lone block, released while products read it": (
        "hgemm-v17_one_wave",
        {"release": "release(ring.stage);"},
        "changed while wgmma read it",
    ),
    "one weight in the place of both": (
        "gated_unit-v03_wgmma",
        {"weight": ("rank == 0 ? maps.b : maps.w2", "maps.b")},
        WRONG,
    ),
    "weights not waited for": ("gated_unit-v04_rows", {"weights_arrived": ""}, "changed while wgmma read it"),
    "a place for y taken before TMA has read it": (
        "gated_unit-v04_rows",
        {"box": ("box == mine ? mine + S::kBox : mine", "mine")},
        "changes while TMA stores it",
    ),
    "both columns with the bias of one": ("gated_unit-v02_mma", {"bias": ("bias1[e % 2]", "bias1[0]")}, WRONG),
    "the biases of the first tile": ("gemm_bias_relu-v03_one_wave", {"col_of_tile": ("col0 + col", "0")}, WRONG),
    "one bias for two columns of a fitted tile": (
        "gemm_bias_relu-v05_fitted",
        {"second_bias": ("bias[second]", "bias[0]")},
        WRONG,
    ),
    "the first column's finish for both": (
        "gemm_bias_relu-v05_fitted",
        {"finish": ("finish(two[1], i % 2)", "finish(two[1], 0)")},
        WRONG,
    ),
    "the first warp's biases for all warps": (
        "gemm_bias_relu-v05_fitted",
        {"columns": ("own", "own % 16")},
        WRONG,
    ),
    "pieces in rows that start anywhere": (
        "gemm_bias_relu-v06_anywhere",
        {"by_pieces": ("ld % 8 == 0", "true")},
        "misaligned access",
    ),
    "pieces below the last row": ("gemm_bias_relu-v06_anywhere", {"row_of_piece": IF_TRUE}, "outside operand"),
    "whole pieces beyond the end of a row": (
        "gemm_bias_relu-v06_anywhere",
        {"whole_piece": IF_TRUE},
        "outside operand",
    ),
    "elements below the last row": (
        "gemm_bias_relu-v06_anywhere",
        {"whole_rows": ("kRows - kRowStep", "0")},
        "outside operand",
    ),
    "elements beyond the end of a row": (
        "gemm_bias_relu-v06_anywhere",
        {"end_of_elements": ("cols_left > 0", "true")},
        "outside operand",
    ),
    "one place for every tile": ("gemm_bias_relu-v06_anywhere", {"stage": ("tile % 2", "0")}, WRONG),
    "a tile read before all have stored it": ("gemm_bias_relu-v06_anywhere", {"stored": ""}, WRONG),
    "sums beyond the last column": ("gemm_bias_relu-v06_anywhere", {"last_column": IF_FALSE}, "outside operand"),
    "sums below the last row": (
        "gemm_bias_relu-v06_anywhere",
        {"last_row": ("of < g.m", "true")},
        "outside operand y",
    ),
    "the first column's bias for all of a thread": (
        "gemm_bias_relu-v06_anywhere",
        {"bias_of_sum": ("g.bias[at]", "g.bias[col]")},
        WRONG,
    ),
    "the other side of GELU": (
        "gemm_bias_gelu-v01_mma",
        {"gelu": ("a * exp2_approx(p)", "-a * exp2_approx(p)")},
        WRONG,
    ),
    "the bias of the first tile for GELU": ("gemm_bias_gelu-v03_pingpong", {"bias_of_tile": ("origin.y", "0")}, WRONG),
    "the other tile's turn before this one's last products": (
        "gemm_bias_gelu-v03_pingpong",
        {"turn": ""},
        "changed while|more often",
    ),
    "the bias of one column for its neighbour": (
        "gemm_bias_relu-v03_one_wave",
        {"bias_of_column": ("e % 2 ? bias.y : bias.x", "e < 2 ? bias.x : bias.y")},
        WRONG,
    ),
}
