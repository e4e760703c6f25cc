"""Mistakes to plant in CUDA kernels: `tests/emulator` compiles all of a file's into one library and switches one on. Where in
the kernel, and how it is said: `planting.py`."""

from __future__ import annotations

from tests.emulator import mistakes_in_attention, mistakes_in_gemm, mistakes_in_quant_gemm
from tests.emulator.planting import IF_FALSE, IF_TRUE, Edit

WRONG = ""
# The file, what is changed at which of its markers, and what is then seen: this error, or a wrong result.
BROKEN: dict[str, tuple[str, dict[str, Edit], str]] = {
    **mistakes_in_attention.BROKEN,
    **mistakes_in_gemm.BROKEN,
    **mistakes_in_quant_gemm.BROKEN,
    "a token that is not there": ("rope-v02_vectors", {"token": IF_FALSE}, "outside operand"),
    "the sine of forward in backward": ("rope-v02_vectors", {"sine_halves": ("kBackward ? -s : s", "s")}, WRONG),
    "angles of the first vector for the second": (
        "rope-v02_vectors",
        {"sine_pairs": ("kBackward ? -t : t", "s")},
        WRONG,
    ),
    "what is not rotated not copied": ("rope-v02_vectors", {"in_place": IF_TRUE}, WRONG),
    "elements behind the vectors not summed": ("seq_sum-v02_block", {"tail": IF_FALSE}, WRONG),
    "a sequence that is not there": (
        "seq_sum-v02_block",
        {"sequence": ("number < p.count()", "true")},
        "outside operand",
    ),
    "a producer that does not wait for an empty buffer": (
        "producer_consumer-v03_producer",
        {"wait_empty": ("named_barrier_sync", "named_barrier_arrive")},
        "wait for ever at a named barrier",  # it runs ahead, and its arrivals at "full" meet in one phase
    ),
    "a buffer that nobody says is empty": (
        "producer_consumer-v03_producer",
        {"say_empty": ""},
        "wait for ever at a named barrier",
    ),
    "a round that does not wait for the stores": ("banks-exchange", {"stored": ""}, WRONG),
    "a row of y at the stride of x": (
        "rmsnorm-v02_vectors",
        {"y_row": ("p.y_stride", "p.x_stride")},
        "outside operand y",
    ),
    "eps forgotten": ("rmsnorm-v02_vectors", {"eps": ("p.eps", "0"), "eps_long": ("p.eps", "0")}, WRONG),
    "sums of a row's warps not waited for": ("rmsnorm-v02_vectors", {"sums_there": ""}, WRONG),
    "what lies beyond a row in its variance": ("layernorm-v02_vectors", {"variance": IF_TRUE}, WRONG),
    "one array for two sums of a row": (
        "layernorm-v02_vectors",
        {"of_variance": ("of_variance", "of_mean"), "of_variance_long": ("of_variance", "of_mean")},
        WRONG,
    ),
    "what lies beyond a row in a warp's variance": ("layernorm-v03_any_width", {"variance": IF_TRUE}, WRONG),
    "means of warps taken for that of the row": ("layernorm-v03_any_width", {"apart": ("apart * apart", "0")}, WRONG),
    "copies not waited for": ("softmax-v06_bulk_copies", {"arrived": ""}, WRONG),
    "mail not waited for": ("softmax-v06_bulk_copies", {"mailed": ""}, WRONG),
    "a residual stored beyond its row": (
        "add_rmsnorm-v02_vectors",
        {"residual_end": IF_TRUE},
        "outside operand residual",
    ),
    "the residual's row at the stride of x": (
        "add_rmsnorm-v02_vectors",
        {"residual_row": ("p.residual_stride", "p.x_stride")},
        "outside operand residual",
    ),
    "one array for the sums of two rows in turn": ("rmsnorm_backward-v02_two_stages", {"turn": ("turn", "0")}, WRONG),
    "parts of a column not waited for": ("rmsnorm_backward-v02_two_stages", {"parts_there": ""}, WRONG),
    "a row's sum over the lanes of all rows": (
        "softmax-v07_short_rows",
        {"lanes_of_row": ("reduce_lanes(found, lanes)", "reduce_lanes(found)")},
        WRONG,
    ),
    "elements behind a row that count": (
        "softmax-v07_short_rows",
        {"valid": ("at < valid", "at < p.n")},
        "outside operand",
    ),
    "the sums of the first row for all": ("softmax-v04_split_rows", {"sums_of_row": ("int64_t(part.row)", "0")}, WRONG),
    "maxima of warps not waited for": ("softmax-v04_split_rows", {"maxima_there": ""}, WRONG),
    "a row written beyond its end": ("embedding-v02_vectors", {"row_end": IF_TRUE}, "outside operand y"),
    "a token without a place": ("kv_append-v02_vectors", {"place": IF_FALSE}, "outside operand"),
    "a token without a place in the cache": (
        "rope_append-v02_vectors",
        {"place": ("where", "(where < 0 ? 0 : where)")},
        WRONG,
    ),
    "values rotated, too": ("rope_append-v02_vectors", {"values": IF_TRUE}, WRONG),
    "a head's norm from one thread": (
        "rope_append-v02_vectors",
        {"head_sum": ("sum_of_head(sum, lanes)", "sum")},
        WRONG,
    ),
    "keys with the weight of queries": (
        "rope_append-v02_vectors",
        {"weights": ("p.part(head) == Part::k", "0")},
        WRONG,
    ),
    "a rotation that adds both sines": (
        "rope_append-v02_vectors",
        {"minus": ("before * cos[i] - y[i] * sin[i]", "before * cos[i] + y[i] * sin[i]")},
        WRONG,
    ),
    "what is not rotated not stored": ("rope_append-v01_naive", {"rest": IF_TRUE}, WRONG),
    "a scale from one warp": (
        "silu_mul_quant-v02_vectors",
        {"maximum": ("reduce_row(largest, partial, Max{})", "largest")},
        WRONG,
    ),
    "bytes beyond the row": ("silu_mul_quant-v02_vectors", {"row_end": IF_TRUE}, "outside operand"),
    "the largest of the pieces that a thread keeps": ("silu_mul_quant-v01_any_width", {"rest_maximum": ""}, WRONG),
    "a sum that misses what a thread does not keep": ("add_rmsnorm_quant-v01_any_width", {"rest_seen": ""}, WRONG),
    "the largest product of one thread": (
        "add_rmsnorm_quant-v02_vectors",
        {"maximum": ("reduce_row(seen.largest, of_largest, Max{})", "seen.largest")},
        WRONG,
    ),
    "bytes of a sum beyond its row": ("add_rmsnorm_quant-v02_vectors", {"row_end": IF_TRUE}, "outside operand"),
    "v at the scale of k": ("kv_append-v02_vectors", {"v_scale": ("factors[1]", "factors[0]")}, WRONG),
    "tokens of other heads": (
        "merge_state-v02_vectors",
        {"last_tokens": ("token >= p.seq", "false")},
        "outside operand",
    ),
    "values of a state without keys": (
        "merge_state-v02_vectors",
        {"unused_values": ("weights.merge(a[i], b[i])", "weights.of_a * a[i] + weights.of_b * b[i]")},
        WRONG,
    ),
    "one input in the place of both": ("silu_mul-v02_vectors", {"inputs": ("x[i][j]", "x[0][j]")}, WRONG),
    "results beyond the row": ("silu_mul-v02_vectors", {"row_end": IF_TRUE}, "outside operand"),
    "experts counted before all warps have chosen": ("moe_route-v02_one_launch", {"chosen": ""}, WRONG),
    "slots of the blocks before not counted": ("moe_route-v02_one_launch", {"before": ("counts.before", "0")}, WRONG),
    "the bins of the digit before": ("sample-v02_split", {"next_bins": ""}, WRONG),
    "bins read before all blocks have added theirs": ("sample-v02_split", {"bins_there": ""}, WRONG),
    "rows of x by their place in the order": (
        "moe_ffn-v02_mma",
        {"slot": ("slot_at(i)", "unsigned(tile.begin + i)")},
        WRONG,
    ),
    "tiles counted without an expert's last rows": (
        "moe_ffn-v02_mma",
        {"last_rows": ("(end - from + kRows - 1) / kRows", "(end - from) / kRows")},
        WRONG,
    ),
    "rows reported before they have arrived": (
        "moe_ffn-v03_wgmma",
        {"rows_arrived": "barrier_arrive(full + ring.stage);"},
        "ends while its cp.async are in flight",
    ),
    "rows that cp.async wrote not fenced for wgmma": (
        "moe_ffn-v03_wgmma",
        {"fence": ("fence_async();", "")},
        "wgmma reads what cp.async wrote without a fence since",
    ),
    "half a tile's rows not copied": (
        "moe_ffn-v03_wgmma",
        {"half_rows": ("tile.rows > 64 ? kRows : kRows / 2", "kRows / 2")},
        WRONG,
    ),
    "rows of a pair's tile reported before they have arrived": (
        "moe_ffn-v05_pairs",
        {"rows_arrived": "barrier_arrive(full + ring.stage);"},
        "ends while its cp.async are in flight",
    ),
    "rows of a pair's tile not fenced for wgmma": (
        "moe_ffn-v05_pairs",
        {"fence": ("fence_async();", "")},
        "wgmma reads what cp.async wrote without a fence since",
    ),
    "both blocks of a pair take the first half": ("moe_ffn-v05_pairs", {"rank": ("rank", "0")}, WRONG),
    "experts by their rows, tiles by their numbers": (
        "moe_ffn-v05_pairs",
        {"experts": ("groups.experts[at]", "at")},
        WRONG,
    ),
    "partial sums overwritten while they are read": ("moe_ffn-v04_few_rows", {"sums_read": ""}, WRONG),
    "a piece decoded before all have copied it": ("dequant-v02_vectors", {"copied": ""}, WRONG),
}


# What no case sees that the others do: a test of its own does.
# Of an entry that is not the op's: tests/functional/test_scored_decode.py plants them one at a time.
SCORED: tuple[str, dict[str, Edit]] = (
    "decode_attention-v05_scored",
    {
        "cap": ("scoring.softcap * tanh_by_exp2(scores[n] * inside)", "scores[n]"),
        "first": ("scoring.first(seen)", "0"),
        "clear_front": "",
        "sink": ("divided(all, scoring, head, p.scale_of_v())", "all.divided(p.scale_of_v())"),
    },
)
# And tests/functional/test_wide_decode.py.
WIDE: tuple[str, dict[str, Edit]] = (
    "decode_attention-v05_scored",
    {
        "row_page": ("__shfl_sync(0xffffffff, page, row)", "__shfl_sync(0xffffffff, page, 0)"),
        "small_end": ("key0 + row < piece.keys", "true"),
        "part_page": ("__shfl_sync(0xffffffff, page, row)", "__shfl_sync(0xffffffff, page, 0)"),
        "tree": ("seen_new[query]", "(2u << query) - 1"),
        "before_first": ("seen == 0", "false"),
        "seen_there": "",
    },
)
# And tests/functional/test_seeded.py.
SEEDED: tuple[str, dict[str, Edit]] = (
    "sample-v04_seeded",
    {
        "row": ("uniform_of(from.seed, from.offset, row)", "uniform_of(from.seed, from.offset, 0)"),
        "logits": ("row * p.stride", "0"),
    },
)
# The mistakes for tests/functional/test_key_parts.py, planted one at a time. FP8_PARTS are for v16 only.
KEY_PARTS: tuple[str, dict[str, Edit]] = (
    "prefill_attention-v14_key_parts",
    {
        "first_block": ("whole.begin + blocks * number / parts", "blocks * number / parts"),
        "no_key": ("online.base[r] != -INFINITY", "true"),
        "parts_there": ("parts_of(blocks, most, kLeastBlocks)", "most"),
        "slot": ("part * order.pieces() + index", "part"),
    },
)
WIDE_PARTS: tuple[str, dict[str, Edit]] = (
    "prefill_attention-v17_wide_parts",
    {
        "behind_last": ("whole * (number + 1) / parts", "(whole * (number + 1) / parts - (number + 1 < parts))"),
        "first_block": "",
        "parts_there": ("parts_of(w.blocks, most, kLeastWide)", "most"),
        "slot": ("part * order.pieces() + index", "part"),
    },
)
FP8_PARTS: tuple[str, dict[str, Edit]] = (
    "prefill_attention-v16_fp8_gathered",
    {
        "keys_of_parts": ("p.scales[0]", "p.scales[1]"),
        "values_of_parts": "",
        "halves": ("0.5f * exponent", "exponent"),
    },
)
SINKS: tuple[str, dict[str, Edit]] = "prefill_attention-v08_compact", {"sink": ("kLog2E", "1.0f")}
# And the emulator test of the entries of early products of packed weights.
GATED: tuple[str, dict[str, Edit]] = "quant_gemm-v10_early", {"gate": ("sum / (1.0f + __expf(-sum))", "sum")}
# And that of rows of any length in wider tensors.
WIDER: tuple[str, dict[str, Edit]] = (
    "gemm_bias_relu-v06_anywhere",
    {"end_of_row": ("e < cols_left", "e + 1 < cols_left")},
)
WHOLE: tuple[str, dict[str, Edit]] = "decode_attention-v03_packed", {"whole": "return;"}


def mistakes_of(file: str) -> dict[int, dict[str, Edit]]:
    """The edits of a file's sources, by the numbers that switch them on."""
    return dict(enumerate((edits for its, edits, _ in BROKEN.values() if its == file), 1))


def number_of(how: str) -> int:
    """What switches a mistake on in the library of its file."""
    file = BROKEN[how][0]
    return [other for other, (its, *_) in BROKEN.items() if its == file].index(how) + 1
