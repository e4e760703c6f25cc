"""Those of `tests.emulator.mistakes` that are planted in products of matrices."""

from __future__ import annotations

WRONG = ""
BROKEN = {
    "wrong index": ("hgemm-v02_tiled", {"sum += a_tile[y][k] * «b_tile[k][x]»": "b_tile[x][k]"}, WRONG),
    "a stage stored before all have read it": (
        "sgemm-v05_register_tiles",
        {"if (more) pieces.store(stages[current]);\n    «__syncthreads();»": ""},
        WRONG,
    ),
    "no barrier after the load": ("hgemm-v02_tiled", {"«__syncthreads();»\n#pragma unroll": ""}, WRONG),
    "no barrier before the next load": ("hgemm-v02_tiled", {"[x];\n    «__syncthreads();»": ""}, WRONG),
    "edge in M not checked": (
        "hgemm-v02_tiled",
        {"«row0 + y < g.m» && k0": "true", "«row0 + y >= g.m» ||": "false"},
        "outside operand",
    ),
    "B not transposed": ("hgemm-v04_mma", {"«ldmatrix_x4_trans»(two": "ldmatrix_x4"}, WRONG),
    "rows of A beyond the edge": ("hgemm-v04_mma", {"row0 + r < rows": "true"}, "outside operand"),
    "waits for one group too few": (
        "hgemm-v05_pipelined",
        {"cp_async_wait<kStages - 2>()": "cp_async_wait<kStages - 1>()"},
        "in flight",
    ),
    "no barrier before a stage is read": ("hgemm-v05_pipelined", {"«__syncthreads();»  // all": ""}, WRONG),
    "copies beyond the edge": ("hgemm-v05_pipelined", {"rows_left && «cols_left > 0»": "true"}, "outside the operands"),
    "swizzled when written only": (
        "hgemm-v06_swizzled",
        {
            "(f.a[i], tile + «Place::at(row + i * 16 + lane % 16, k + lane / 16 * 8)»": (
                "Padded<24>::at(row + i * 16 + lane % 16, k + lane / 16 * 8)"
            )
        },
        WRONG,
    ),
    "no barrier before a stage is filled": (
        "hgemm-v06_swizzled",
        {"«__syncthreads();»\n          used": ""},
        WRONG,
    ),
    "a row of A that is not there": ("hgemm-v15_gemv", {"k < g.k && «lane / 4 < g.m»": "true"}, "outside operand"),
    "sums of warps not waited for": ("hgemm-v15_gemv", {"«__syncthreads();»\n  for": ""}, WRONG),
    "columns of a product swapped": ("hgemm-v15_gemv", {"+ 2 * product + «upper»": "1 - upper"}, WRONG),
    "added up before all have come": ("hgemm-v16_skinny", {"== «count - 1»;": "0"}, WRONG),
    "sums at another block's place": ("hgemm-v08_stream_k", {"(2LL * block + «second»)": "0"}, WRONG),
    "a step of another tile": ("hgemm-v08_stream_k", {"«step - dealt * k_tiles»,": "0"}, WRONG),
    "a tile twice": ("hgemm-v07_tuned", {"«within / rows»}": "within % rows"}, WRONG),
    "rows staged where another warp does": (
        "hgemm-v07_tuned",
        {"stages + threadIdx.x / 32 * Block::Warp::kStaged": "stages"},
        WRONG,
    ),
    "no wait for a full stage": (
        "hgemm-v10_wgmma",
        {"barrier_wait(full + ring.stage, ring.parity);": ""},
        "changed while wgmma read it",
    ),
    "a stage released while products read it": (
        "hgemm-v11_specialised",
        {"if (step > 0) release(before);": "release(ring.stage);"},
        "changed while wgmma read it",
    ),
    "no turns": (
        "hgemm-v12_pingpong",
        {"barrier_wait(turn + warpgroup, turn_parity);": ""},
        "changed while|more often",
    ),
    "the phases of the other's tile not skipped": (
        "hgemm-v12_pingpong",
        {"«ring.skip(steps);»  //": ""},
        "wait for ever",
    ),
    "no fence before a TMA store": ("hgemm-v13_cooperative", {"    «fence_async();»\n": ""}, "without a fence since"),
    "a box filled while TMA reads it": (
        "hgemm-v13_cooperative",
        {"tma_store_wait<kPending>()": "tma_store_wait<kPending + 1>()"},
        "changes while TMA stores it",
    ),
    "a box of two filled while TMA reads it": (
        "hgemm-v12_pingpong",
        {"tma_store_wait<kPending>()": "tma_store_wait<kPending + 1>()"},
        "changes while TMA stores it",
    ),
    "a stage released in one block of the cluster": (
        "hgemm-v13_cooperative",
        {"threadIdx.x % 32 < kCluster": "threadIdx.x % 32 == 0"},
        "wait for ever at an mbarrier",
    ),
    "a block that does not wait for its cluster": (
        "hgemm-v13_cooperative",
        {"«cluster_sync_relaxed();»  // no block": ""},
        "a block that has ended",
    ),
    "a stage shared by a cluster, released while products read it": (
        "hgemm-v12_pingpong",
        {"if (step > 0) release(before);": "release(ring.stage);", "      «release(before);»\n": ""},
        "changed while wgmma read it",
    ),
    "sums that are said to be there too early": (
        "hgemm-v14_stream_k",
        {"warps_sync<kWriters>();": ""},
        WRONG,
    ),
    "a helper's sums where another's are": (
        "hgemm-v14_stream_k",
        {"tile - deal.whole + «helper»": "0"},
        "nobody has taken down|wait for ever",
    ),
    "sums added before they have come": (
        "hgemm-v14_stream_k",
        {"          «stages.wait_full();»\n": ""},
        "changed while",
    ),
    "others' sums copied without a fence": (
        "hgemm-v14_stream_k",
        {"fence_async_global();": ""},
        "what others wrote without a fence",
    ),
    "half of B not copied to the other block": (
        "hgemm-v14_small",
        {"(1 << kCluster) - 1": "1 << rank"},
        "wait for ever at an mbarrier",
    ),
    "copies to a block whose barriers are not there": (
        "hgemm-v14_small",
        {"kCluster > 1 ? cluster_sync_relaxed() : __syncthreads();": "__syncthreads();"},
        "not initialised|has ended",
    ),
    "a tile that leaves through stages that are read": (
        "hgemm-v14_small",
        {"«warps_sync<kProducer>();»  // all stages": ""},
        "changed while wgmma read it",
    ),
    "boxes of two warpgroups at one place": (
        "hgemm-v14_small",
        {"(shared) + «warpgroup» * Tile::kAllBoxes": "1"},
        "changes while TMA stores it|without a fence since",
    ),
    "the columns of the other warpgroup": ("hgemm-v14_small", {"Tiles::kA + «col * kBlockK»": "0"}, WRONG),
    "rows waited for that are not copied": (
        "hgemm-v17_one_wave",
        {"step * kBlockK, «Shape::rows(g.m)»)": "Tiles::kA / kBlockK"},
        "wait for ever at an mbarrier",
    ),
    "a box that is not swizzled, written as if": (
        "hgemm-v17_one_wave",
        {"«kBoxN == 64» ? piece": "true"},
        "changes while TMA stores it|without a fence since",
    ),
    "a product beyond shared memory": (
        "hgemm-v17_one_wave",
        {"(kTN ? 2 : 128)": "4096"},
        "operand is outside shared memory",
    ),
    "steps of a transposed operand as of the other": ("hgemm-v17_one_wave", {"(kTN ? 2 : 128)": "2"}, WRONG),
    "an operand that is not transposed": (
        "hgemm-v17_one_wave",
        {
            "wgmma<In, !kTN>(sums[i], rows + i * (kSlab * sizeof(In) / 16) + step * 2, cols + step * (kTN ? 2 : 128),\n"
            "                       !first || step > 0);": (
                "wgmma<In, false>(sums[i], rows + i * (kSlab * sizeof(In) / 16) + step * 2, cols + step * 2, "
                "!first || step > 0);"
            )
        },
        WRONG,
    ),
    "a stage of a lone block, released while products read it": (
        "hgemm-v17_one_wave",
        {"if (step > 0) release(before);": "release(ring.stage);"},
        "changed while wgmma read it",
    ),
    "one weight in the place of both": (
        "gated_unit-v03_wgmma",
        {"«rank == 0 ? maps.b : maps.w2»": "maps.b"},
        WRONG,
    ),
    "weights not waited for": (
        "gated_unit-v04_rows",
        {"barrier_wait(ready, 0);": ""},
        "changed while wgmma read it",
    ),
    "a place for y taken before TMA has read it": (
        "gated_unit-v04_rows",
        {"«box == mine ? mine + S::kBox : mine»": "mine"},
        "changes while TMA stores it",
    ),
    "both columns with the bias of one": ("gated_unit-v02_mma", {"«bias1[e % 2]»": "bias1[0]"}, WRONG),
    "the biases of the first tile": (
        "gemm_bias_relu-v03_one_wave",
        {"epilogue(g, «col0 + col»);": "0"},
        WRONG,
    ),
    "the other side of GELU": ("gemm_bias_gelu-v01_mma", {"erff(0.70710678f * «x»)": "-x"}, WRONG),
    "the bias of the first tile for GELU": (
        "gemm_bias_gelu-v03_pingpong",
        {"biases(g, «origin.y»);": "0"},
        WRONG,
    ),
    "the other tile's turn before this one's last products": (
        "gemm_bias_gelu-v03_pingpong",
        {"barrier_wait(turn + warpgroup, turn_parity);": ""},
        "changed while|more often",
    ),
    "the bias of one column for its neighbour": (
        "gemm_bias_relu-v03_one_wave",
        {"(«e % 2 ? bias.y : bias.x»)": "e < 2 ? bias.x : bias.y"},
        WRONG,
    ),
    "the zero of another group": (
        "quant_gemm-v02_gemv",
        {"element(Piece<F>::kGroups + «group»)": "0"},
        WRONG,
    ),
    "the sums of one part of k for all": (
        "quant_gemm-v02_gemv",
        {"__ldcg(parts + «s * (kRows * kMostM)» + threadIdx.x)": "0"},
        WRONG,
    ),
    "the first row's scale for all rows of x": ("quant_gemm-v03_mma", {"p.x_scales[«row»]": "row0"}, WRONG),
    "scales of the first N-slice for all": (
        "quant_gemm-v06_fp8_one_wave",
        {"const int col = «col0» + j * 8 + threadIdx.x % 4 * 2;\n    return": "0"},
        WRONG,
    ),
    "one row's scale for two": (
        "quant_gemm-v06_fp8_one_wave",
        {"g.x_scales[«first + 8»]": "first"},
        WRONG,
    ),
    "sums of x read before they are there": (
        "quant_gemm-v03_mma",
        {"«__syncthreads();»  // the copies of all threads": ""},
        WRONG,
    ),
    "eights of x in the order of memory": (
        "quant_gemm-v07_stream",
        {"by = («eight % kWords * 4 + eight / kWords» - eight)": "eight"},
        WRONG,
    ),
    "the scales of the first eight rows for all": (
        "quant_gemm-v07_stream",
        {"(t / 2 ? «high_row» : low_row)": "low_row"},
        WRONG,
    ),
    "x read before all of it is in order": (
        "quant_gemm-v07_stream",
        {"x_sums, row_bytes);\n  «__syncthreads();»": ""},
        WRONG,
    ),
    "one slice of k in the place of all": (
        "quant_gemm-v07_stream",
        {"for (int s = 0; s < «split.slices»; ++s) sum": "1"},
        WRONG,
    ),
    "a group of W read before it has arrived": (
        "quant_gemm-v07_stream",
        {"«cp_async_wait<kStages - 1>();»": ""},
        "ends while its cp.async are in flight",
    ),
    "larger blocks than the compiler keeps registers for": (
        "quant_gemm-v07_stream",
        {"__launch_bounds__(«32 * kMostWarps», 1)": "32"},
        "its __launch_bounds__ allow 32",
    ),
    "sums of a stage that go on in the next one": (
        "quant_gemm-v08_fp8_promoted",
        {"these + i * 2, «i > 0»": "true"},
        WRONG,
    ),
    "one half of the columns for both": (
        "quant_gemm-v08_fp8_promoted",
        {"cols + «half» * (kPartN": "0"},
        WRONG,
    ),
}
