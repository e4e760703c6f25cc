"""Mistakes to plant in CUDA kernels: `tests/emulator` compiles all of a file's into one library and switches one on."""

from __future__ import annotations

WRONG = ""
# The file, what is changed in it, and what is then seen: this error, or a wrong result.
BROKEN = {
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
        {"stages + «warpgroup» * Tile::kAllBoxes": "1"},
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
            "wgmma<T, !kTN>(sums[i], rows + i * (kSlab * sizeof(T) / 16) + step * 2, cols + step * (kTN ? 2 : 128),\n"
            "                       !first || step > 0);": (
                "wgmma<T, false>(sums[i], rows + i * (kSlab * sizeof(T) / 16) + step * 2, cols + step * 2, "
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
    "scores that are not scaled": ("prefill_attention-v01_naive", {"sum *= «p.scale»;": "1.0f"}, WRONG),
    "keys of the query head": (
        "prefill_attention-v01_naive",
        {"s.first_kv + key, «p.kv_head(head)»);\n  float": "head"},
        "outside operand",
    ),
    "sums not scaled when the maximum grows": (
        "prefill_attention-v02_flash",
        {"sums[i] *= «rescale»;": "1.0f"},
        WRONG,
    ),
    "tiles refilled while a warp reads them": (
        "prefill_attention-v02_flash",
        {"«__syncthreads();»  // all are": ""},
        WRONG,
    ),
    "an edge of the mask taken for its inside": (
        "prefill_attention-v03_mma",
        {"if («key < bottom.begin || key + kKeys > top.end») warp.mask": "false"},
        WRONG,
    ),
    "v not waited for": (
        "prefill_attention-v03_mma",
        {"«cp_async_wait<0>();»\n    __syncthreads();  // v": ""},
        WRONG,
    ),
    "k refilled while a warp multiplies it": (
        "prefill_attention-v03_mma",
        {"«__syncthreads();»  // v has": ""},
        WRONG,
    ),
    "values behind the last one as they are": (
        "prefill_attention-v04_wgmma",
        {"rows.clear_tail(w, key0, ring.stage);": ""},
        WRONG,
    ),
    "keys given back while a product reads them": (
        "prefill_attention-v04_wgmma",
        {
            "wgmma_wait_for<0>(scores);\n    rows.release(tile.empty_k + ring.stage);": (
                "rows.release(tile.empty_k + ring.stage); wgmma_wait_for<0>(scores);"
            )
        },
        "changed while wgmma read it",
    ),
    "out at the base before": ("prefill_attention-v05_pingpong", {"if («grows») scale_rows": "false"}, WRONG),
    "values given back while a product reads them": (
        "prefill_attention-v05_pingpong",
        {
            "wgmma_wait_for<0>(rows.out);\n    rows.release(tile.empty_v + values.stage);": (
                "rows.release(tile.empty_v + values.stage); wgmma_wait_for<0>(rows.out);"
            )
        },
        "changed while wgmma read it",
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
}


def mistakes_of(file: str) -> dict[int, dict[str, str]]:
    """The edits of a file's sources, by the numbers that switch them on."""
    return dict(enumerate((edits for its, edits, _ in BROKEN.values() if its == file), 1))


def number_of(how: str) -> int:
    """What switches a mistake on in the library of its file."""
    file = BROKEN[how][0]
    return [other for other, (its, *_) in BROKEN.items() if its == file].index(how) + 1
