"""Mistakes to plant in CUDA kernels: `tests/emulator` compiles all of a file's into one library and switches one on."""

from __future__ import annotations

from tests.emulator import mistakes_in_attention, mistakes_in_gemm

WRONG = ""
# The file, what is changed in it, and what is then seen: this error, or a wrong result.
BROKEN = {
    **mistakes_in_attention.BROKEN,
    **mistakes_in_gemm.BROKEN,
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
        {"«cp_async_arrive(full + ring.stage);»": "barrier_arrive(full + ring.stage);"},
        "ends while its cp.async are in flight",
    ),
    "rows that cp.async wrote not fenced for wgmma": (
        "moe_ffn-v03_wgmma",
        {"«fence_async();»  // wgmma sees what cp.async has written": ""},
        "wgmma reads what cp.async wrote without a fence since",
    ),
    "half a tile's rows not copied": (
        "moe_ffn-v03_wgmma",
        {"count(«tile.rows > 64 ? kRows : kRows / 2»)": "kRows / 2"},
        WRONG,
    ),
    "rows of a pair's tile reported before they have arrived": (
        "moe_ffn-v05_pairs",
        {"«cp_async_arrive(full + ring.stage);»": "barrier_arrive(full + ring.stage);"},
        "ends while its cp.async are in flight",
    ),
    "rows of a pair's tile not fenced for wgmma": (
        "moe_ffn-v05_pairs",
        {"«fence_async();»  // wgmma sees what cp.async has written": ""},
        "wgmma reads what cp.async wrote without a fence since",
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
}


def mistakes_of(file: str) -> dict[int, dict[str, str]]:
    """The edits of a file's sources, by the numbers that switch them on."""
    return dict(enumerate((edits for its, edits, _ in BROKEN.values() if its == file), 1))


def number_of(how: str) -> int:
    """What switches a mistake on in the library of its file."""
    file = BROKEN[how][0]
    return [other for other, (its, *_) in BROKEN.items() if its == file].index(how) + 1
