"""Mistakes to plant in CUDA kernels: `tests/emulator` compiles all of a file's into one library and switches one on."""

from __future__ import annotations

from tests.emulator import mistakes_in_attention

WRONG = ""
# The file, what is changed in it, and what is then seen: this error, or a wrong result.
BROKEN = {
    **mistakes_in_attention.BROKEN,
    "a token that is not there": ("rope-v02_vectors", {"if («token >= p.seq») return;": "false"}, "outside operand"),
    "the sine of forward in backward": (
        "rope-v02_vectors",
        {"cos.values[0][i], «kBackward ? -s : s»);\n    }": "s"},
        WRONG,
    ),
    "angles of the first vector for the second": (
        "rope-v02_vectors",
        {"cos.values[1][i], «kBackward ? -t : t»": "s"},
        WRONG,
    ),
    "what is not rotated not copied": ("rope-v02_vectors", {"if («p.in_place») continue;": "true"}, WRONG),
    "elements behind the vectors not summed": (
        "seq_sum-v02_block",
        {"if («tail + thread < length») sum": "false"},
        WRONG,
    ),
    "a sequence that is not there": ("seq_sum-v02_block", {"= «number < p.count()» ?": "true"}, "outside operand"),
    "wrong index": ("hgemm-v02_tiled", {"sum += a_tile[y][k] * «b_tile[k][x]»": "b_tile[x][k]"}, WRONG),
    "a stage stored before all have read it": (
        "sgemm-v05_register_tiles",
        {"if (more) pieces.store(stages[current]);\n    «__syncthreads();»": ""},
        WRONG,
    ),
    "a producer that does not wait for an empty buffer": (
        "producer_consumer-v03_producer",
        {"if (number >= 2) «named_barrier_sync»(kEmpty": "named_barrier_arrive"},
        "wait for ever at a named barrier",  # it runs ahead, and its arrivals at "full" meet in one phase
    ),
    "a buffer that nobody says is empty": (
        "producer_consumer-v03_producer",
        {"if (number + 2 < tiles) named_barrier_arrive(kEmpty + number % 2, kAll);": ""},
        "wait for ever at a named barrier",
    ),
    "a round that does not wait for the stores": ("banks-exchange", {"*mine = piece;\n    «__syncwarp();»": ""}, WRONG),
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
    "a row of y at the stride of x": (
        "rmsnorm-v02_vectors",
        {"p.y + row * «p.y_stride»": "p.x_stride"},
        "outside operand y",
    ),
    "eps forgotten": ("rmsnorm-v02_vectors", {" + «p.eps»": "0"}, WRONG),
    "sums of a row's warps not waited for": (
        "rmsnorm-v02_vectors",
        {"«__syncthreads();»\n  const int span": ""},
        WRONG,
    ),
    "the bias of one column for its neighbour": (
        "gemm_bias_relu-v03_one_wave",
        {"(«e % 2 ? bias.y : bias.x»)": "e < 2 ? bias.x : bias.y"},
        WRONG,
    ),
    "what lies beyond a row in its variance": (
        "layernorm-v02_vectors",
        {"if («threadIdx.x + i * blockDim.x < mine») squares": "true"},
        WRONG,
    ),
    "one array for two sums of a row": (
        "layernorm-v02_vectors",
        {"reduce_row(squares, «of_variance»)": "of_mean"},
        WRONG,
    ),
    "a residual stored beyond its row": (
        "add_rmsnorm-v02_vectors",
        {"if («at < mine») to[at]": "true"},
        "outside operand residual",
    ),
    "the residual's row at the stride of x": (
        "add_rmsnorm-v02_vectors",
        {"load_row(residual, p.residual + row * «p.residual_stride»": "p.x_stride"},
        "outside operand residual",
    ),
    "one array for the sums of two rows in turn": (
        "rmsnorm_backward-v02_two_stages",
        {"of_products[«turn»]": "0"},
        WRONG,
    ),
    "parts of a column not waited for": (
        "rmsnorm_backward-v02_two_stages",
        {"[threadIdx.x] = sum;\n  «__syncthreads();»": ""},
        WRONG,
    ),
    "the sums of the first row for all": (
        "softmax-v04_split_rows",
        {"sums[«int64_t(part.row)» * parts + i]": "0"},
        WRONG,
    ),
    "maxima of warps not waited for": (
        "softmax-v04_split_rows",
        {"mine.sum};\n  «__syncthreads();»": ""},
        WRONG,
    ),
    "a row written beyond its end": (
        "embedding-v02_vectors",
        {"if («at < count») to[at]": "true"},
        "outside operand y",
    ),
    "a token without a place": ("kv_append-v02_vectors", {"if («place < 0») return;": "false"}, "outside operand"),
    "v at the scale of k": ("kv_append-v02_vectors", {"of_v, «factors[1]»": "factors[0]"}, WRONG),
    "one input in the place of both": ("silu_mul-v02_vectors", {"inputs[i] = «x[i][j]»": "x[0][j]"}, WRONG),
    "results beyond the row": (
        "silu_mul-v02_vectors",
        {"if («at < count») reinterpret_cast<uint4*>(p.output": "true"},
        "outside operand",
    ),
    "experts counted before all warps have chosen": (
        "moe_route-v02_one_launch",
        {"«__syncthreads();»\n\n  const int expert": ""},
        WRONG,
    ),
    "slots of the blocks before not counted": (
        "moe_route-v02_one_launch",
        {"begin + «counts.before»": "0"},
        WRONG,
    ),
    "the bins of the digit before": ("sample-v02_split", {"bins += kBinWords;": ""}, WRONG),
    "bins read before all blocks have added theirs": (
        "sample-v02_split",
        {"«sync();»\n    for (int i = threadIdx.x; i < kBinWords": ""},
        WRONG,
    ),
    "rows of x by their place in the order": (
        "moe_ffn-v02_mma",
        {"return p.x + «slot_at(i)» / p.k": "unsigned(tile.begin + i)"},
        WRONG,
    ),
    "tiles counted without an expert's last rows": (
        "moe_ffn-v02_mma",
        {"const int own = «(end - from + kRows - 1) / kRows»;": "(end - from) / kRows"},
        WRONG,
    ),
    "rows reported before they have arrived": (
        "moe_ffn-v03_wgmma",
        {"«cp_async_wait<kBehind>();»": ""},
        "shared memory changed while wgmma read it",
    ),
    "half a tile's rows not copied": (
        "moe_ffn-v03_wgmma",
        {"count(«tile.rows > 64 ? kRows : kRows / 2»)": "kRows / 2"},
        WRONG,
    ),
    "rows of a pair's tile reported before they have arrived": (
        "moe_ffn-v05_pairs",
        {"«cp_async_wait<kBehind>();»": ""},
        "shared memory changed while wgmma read it",
    ),
    "both blocks of a pair take the first half": (
        "moe_ffn-v05_pairs",
        {"(within % tiles * kCluster + «rank») * width": "0"},
        WRONG,
    ),
    "experts by their rows, tiles by their numbers": (
        "moe_ffn-v05_pairs",
        {"group = «groups.experts[at]», col": "at"},
        WRONG,
    ),
    "partial sums overwritten while they are read": (
        "moe_ffn-v04_few_rows",
        {"«__syncthreads();»  // all have read": ""},
        WRONG,
    ),
    "a piece decoded before all have copied it": (
        "dequant-v02_vectors",
        {"«__syncthreads();»\n    const int inside": ""},
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
    "scores of half of the columns": ("mla_decode-v02_split", {"scores[n] = «a.x + b.x»": "a.x"}, WRONG),
    "scores read before all warps have left theirs": (
        "mla_decode-v02_split",
        {"multiply_keys(stage);\n      «__syncthreads();»": ""},
        WRONG,
    ),
    "latents behind the last one as they are": (
        "mla_decode-v03_wgmma",
        {"clear_tail(piece.keys - key0, parity);": ""},
        WRONG,
    ),
    "powers in the place of keys that a warp still multiplies": (
        "mla_decode-v03_wgmma",
        {"«named_barrier_sync(kAlone + self, 128);»  // all": ""},
        "changed while wgmma read it",
    ),
    "out at the base before its own scores": (
        "mla_decode-v03_wgmma",
        {"if («grows») scale_rows(out, rescale);\n      start_own": "false"},
        WRONG,
    ),
    "columns of keys not waited for": (
        "mla_decode-v03_wgmma",
        {"wait_full(slab, parity);\n      wgmma_fence();": "wait_full(0, parity); wgmma_fence();"},
        "changed while wgmma read it",
    ),
    "the base of the other warpgroup not followed": (
        "mla_decode-v03_wgmma",
        {"if («online.follow(next, factor, rescale)») scale_rows": "false"},
        WRONG,
    ),
    "the other's stage given back while a product reads it": (
        "mla_decode-v03_wgmma",
        {"wgmma_wait_for<0>(out);\n    release(1 - self, self);": ("release(1 - self, self); wgmma_wait_for<0>(out);")},
        "changed while wgmma read it",
    ),
    "the sums of one warpgroup for both": (
        "mla_decode-v03_wgmma",
        {"total[r] = «tiles.sums[row_of(r)] + tiles.sums[kRows + row_of(r)]»": "tiles.sums[row_of(r)]"},
        WRONG,
    ),
    "parts added up before all are there": (
        "mla_decode-v03_wgmma",
        {"if (threadIdx.x == 0) team_wait(arrived, item.before);": ""},
        WRONG,
    ),
    "a part of a stage given back to one producer of two": (
        "mla_decode-v04_cluster",
        {"if («threadIdx.x % 32 < kCluster») barrier_arrive_at": "threadIdx.x % 32 == 0"},
        "wait for ever at an mbarrier",
    ),
    "half of the rows not copied to the other block": (
        "mla_decode-v04_cluster",
        {"(1 << kCluster) - 1": "1 << cluster_rank()"},
        "wait for ever at an mbarrier",
    ),
    "a block that ends before the other one is done": (
        "mla_decode-v04_cluster",
        {"«cluster_sync_relaxed();»  // no block ends": ""},
        "a block that has ended",
    ),
}


def mistakes_of(file: str) -> dict[int, dict[str, str]]:
    """The edits of a file's sources, by the numbers that switch them on."""
    return dict(enumerate((edits for its, edits, _ in BROKEN.values() if its == file), 1))


def number_of(how: str) -> int:
    """What switches a mistake on in the library of its file."""
    file = BROKEN[how][0]
    return [other for other, (its, *_) in BROKEN.items() if its == file].index(how) + 1
