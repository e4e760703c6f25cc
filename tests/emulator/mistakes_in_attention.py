"""Those of `tests.emulator.mistakes` that are planted in attention."""

from __future__ import annotations

from tests.emulator.planting import IF_FALSE, IF_TRUE, Edit

WRONG = ""
BROKEN: dict[str, tuple[str, dict[str, Edit], str]] = {
    "scores that are not scaled": ("prefill_attention-v01_naive", {"scale": ("p.scale", "1.0f")}, WRONG),
    "keys of the query head": (
        "prefill_attention-v01_naive",
        {"kv_head": ("p.kv_head(head)", "head")},
        "outside operand",
    ),
    "sums not scaled when the maximum grows": ("prefill_attention-v02_flash", {"rescale": ("rescale", "1.0f")}, WRONG),
    "tiles refilled while a warp reads them": ("prefill_attention-v02_flash", {"refill": ""}, WRONG),
    "an edge of the mask taken for its inside": ("prefill_attention-v03_mma", {"mask_edge": IF_FALSE}, WRONG),
    "v not waited for": ("prefill_attention-v03_mma", {"v_arrived": ""}, WRONG),
    "k refilled while a warp multiplies it": ("prefill_attention-v03_mma", {"k_multiplied": ""}, WRONG),
    "rows without a key written before q has arrived": ("prefill_attention-v03_mma", {"q_arrived": IF_FALSE}, WRONG),
    "the first part of a row of 96 columns for all": (
        "prefill_attention-v03_mma",
        {"part_of_row": ("i * stride + n", "i * stride")},
        WRONG,
    ),
    "all keys of a tile in the page of the first": (
        "prefill_attention-v09_paged",
        {"page_of_key": ("of_keys[row]", "of_keys[0]")},
        WRONG,
    ),
    "pages not waited for": ("prefill_attention-v09_paged", {"pages_arrived": ""}, WRONG),
    "the table read behind the last page": (
        "prefill_attention-v09_paged",
        {"last_page": ("key < end", "true")},
        "outside the operands",
    ),
    "each box of a block in the page of the first": (
        "prefill_attention-v10_paged_boxes",
        {"last_box": ("p.place_of(w.number, key)", "p.place_of(w.number, first)")},
        WRONG,
    ),
    "the table read behind the last box": (
        "prefill_attention-v10_paged_boxes",
        {"last_box": ("key < w.s.keys", "true")},
        "outside operand",
    ),
    "boxes of the block before": (
        "prefill_attention-v10_paged_boxes",
        {"next_boxes": ("block - 2", "block - 1")},
        WRONG,
    ),
    "boxes of the block before, heads packed": (
        "prefill_attention-v11_paged_short",
        {"next_boxes": ("block - 2", "block - 1")},
        WRONG,
    ),
    "scores without the scale of keys": (
        "prefill_attention-v12_fp8",
        {"scale_of_k": ("p.scales[0]", "p.scales[1]")},
        WRONG,
    ),
    "values not scaled": ("prefill_attention-v12_fp8", {"scale_of_v": ""}, WRONG),
    "fp8: all keys of a tile in the page of the first": (
        "prefill_attention-v12_fp8",
        {"page_of_bytes": ("pages_of(first)[row]", "pages_of(first)[0]")},
        WRONG,
    ),
    "fp8: the table read behind the last page": (
        "prefill_attention-v12_fp8",
        {"page_there": ("key < end", "true")},
        "outside the operands",
    ),
    "pages of the tile before": (
        "prefill_attention-v12_fp8",
        {"next_pages": ("first + kKeys", "first")},
        WRONG,
    ),
    "bytes not waited for": ("prefill_attention-v12_fp8", {"bytes_arrived": ""}, WRONG),
    "tiles widened while a warp multiplies them": ("prefill_attention-v12_fp8", {"tiles_multiplied": ""}, WRONG),
    "tiles multiplied before they are whole": ("prefill_attention-v12_fp8", {"bytes_widened": ""}, WRONG),
    "gathered: all keys of a block in the page of the first": (
        "prefill_attention-v15_gathered",
        {"page_of_key": ("p.place_of(number, key)", "p.place_of(number, first)")},
        WRONG,
    ),
    "gathered: rows read before their pages are looked up": (
        "prefill_attention-v15_gathered",
        {"offsets_there": ""},
        "misaligned access|outside (the )?operand",
    ),
    "gathered: all heads of a key are the first": (
        "prefill_attention-v15_gathered",
        {"row_of_head": ("head * from.of_head", "0")},
        WRONG,
    ),
    "gathered: values before a window's first key as they are": (
        "prefill_attention-v15_gathered",
        {"whole_blocks": ("p.span(s, 0).begin / block_n * block_n", "p.span(s, 0).begin / 32 * 32")},
        WRONG,
    ),
    "gathered: the rows of the first sequence for all": (
        "prefill_attention-v16_fp8_gathered",
        {"first_row": ""},
        WRONG,
    ),
    "gathered: scores without the scale of keys": (
        "prefill_attention-v16_fp8_gathered",
        {"scale_of_keys": ("scales[0]", "scales[1]")},
        WRONG,
    ),
    "gathered: values not scaled": ("prefill_attention-v16_fp8_gathered", {"scale_of_values": ""}, WRONG),
    "gathered: out multiplied twice by the whole factor": (
        "prefill_attention-v16_fp8_gathered",
        {"root": ("0.5f", "1.0f")},
        WRONG,
    ),
    "values as far apart as longer keys": (
        "prefill_attention-v05_pingpong",
        {"values_of_stage": ("Tile::kV", "Tile::kK")},
        WRONG,
    ),
    "values behind the last one as they are": ("prefill_attention-v04_wgmma", {"clear_tail": ""}, WRONG),
    "keys given back while a product reads them": (
        "prefill_attention-v04_wgmma",
        {"scores_done": "", "release_k": "rows.release(tile.empty_k + ring.stage); wgmma_wait_for<0>(scores);"},
        "changed while wgmma read it",
    ),
    "out at the base before": ("prefill_attention-v05_pingpong", {"rescale": IF_FALSE}, WRONG),
    "values given back while a product reads them": (
        "prefill_attention-v05_pingpong",
        {"out_done": "", "release_v": "rows.release(tile.empty_v + values.stage); wgmma_wait_for<0>(rows.out);"},
        "changed while wgmma read it",
    ),
    "a slab of out filled while TMA reads it": (
        "prefill_attention-v05_pingpong",
        {"slab_stored": ("tma_store_wait<Tile::kOutSlabs - 1>()", "tma_store_wait<Tile::kOutSlabs>()")},
        "changes while TMA stores it",
    ),
    "rows stored over the next sequence's": ("prefill_attention-v04_wgmma", {"whole_rows": IF_TRUE}, WRONG),
    "out at the base before, with no maximum": ("prefill_attention-v06_no_maximum", {"rescale": IF_FALSE}, WRONG),
    "exponentials too large for their type": (
        "prefill_attention-v06_no_maximum",
        {"too_large": ("!(part[0] <= kMost && part[1] <= kMost)", "false")},
        WRONG,
    ),
    "a tile multiplied before its queries have arrived": (
        "prefill_attention-v06_no_maximum",
        {"queries_arrived": ""},
        "changed while wgmma read it",
    ),
    "the sums of the tile before": (
        "prefill_attention-v06_no_maximum",
        {"next_scores": ("block + 2 < w.blocks", "true")},
        WRONG,
    ),
    "queries read before they have arrived": (
        "prefill_attention-v07_short",
        {"queries_read": ""},
        "arrives at an mbarrier more often",
    ),
    "each row of packed heads a query": (
        "prefill_attention-v07_short",
        {"row_of_query": ("row >> log_packed", "row")},
        WRONG,
    ),
    "packed rows stored over the next sequence's": ("prefill_attention-v07_short", {"whole_queries": IF_TRUE}, WRONG),
    "values behind the last one as they are, heads packed": (
        "prefill_attention-v07_short",
        {"clear_last": ""},
        WRONG,
    ),
    "out at the base before, heads packed": ("prefill_attention-v07_short", {"rescale": IF_FALSE}, WRONG),
    "queries of the ring read before they have arrived": (
        "prefill_attention-v08_compact",
        {"queries_read": ""},
        "changed while wgmma read it",
    ),
    "packed rows of the ring stored over the next sequence's": (
        "prefill_attention-v08_compact",
        {"whole_queries": IF_TRUE},
        WRONG,
    ),
    "values of the ring behind the last one as they are": ("prefill_attention-v08_compact", {"clear_last": ""}, WRONG),
    "out at the base before, one ring": ("prefill_attention-v08_compact", {"rescale": IF_FALSE}, WRONG),
    "rows of q copied over rows of out that TMA stores": (
        "prefill_attention-v13_wide_heads",
        {"out_read": ""},
        "changes while TMA stores it",
    ),
    "a piece multiplied before it has arrived": (
        "prefill_attention-v13_wide_heads",
        {"piece_arrived": ""},
        "changed while wgmma read it",
    ),
    "a piece given back while a product reads it": (
        "prefill_attention-v13_wide_heads",
        {"piece_done": ("wgmma_wait<1>()", "wgmma_wait<2>()")},
        "changed while wgmma read it",
    ),
    "values of pieces behind the last one as they are": ("prefill_attention-v13_wide_heads", {"clear_tail": ""}, WRONG),
    "out at the base before, wide heads": ("prefill_attention-v13_wide_heads", {"sums_rescaled": IF_FALSE}, WRONG),
    "parts of keys without their last block": (
        "prefill_attention-v14_key_parts",
        {"behind_last": ("blocks * (number + 1) / parts", "blocks * (number + 1) / parts - (number + 1 < parts)")},
        WRONG,
    ),
    "parts of keys added without regard to their bases": (
        "prefill_attention-v14_key_parts",
        {"weight": ("weight_of(stats[i].x - zero)", "1.0f")},
        WRONG,
    ),
    "boxes of the block before, keys in parts": (
        "prefill_attention-v18_paged_parts",
        {"next_boxes": ("block - 2", "block - 1")},
        WRONG,
    ),
    "parts of keys in pages without their last block": (
        "prefill_attention-v18_paged_parts",
        {"behind_last": ("blocks * (number + 1) / parts", "blocks * (number + 1) / parts - (number + 1 < parts)")},
        WRONG,
    ),
    "every new token sees all keys": ("decode_attention-v01_naive", {"seen": ("query", "p.new_tokens - 1")}, WRONG),
    "exponentials replaced while they are read": ("decode_attention-v01_naive", {"q_arrived": ""}, WRONG),
    "parts added without regard to their bases": (
        "decode_attention-v02_split",
        {"weight": ("weight_of(stats[i].x - zero)", "1.0f")},
        WRONG,
    ),
    "keys read beyond the last": ("decode_attention-v02_split", {"last_key": IF_FALSE}, "outside operand"),
    "a part of keys for all": ("decode_attention-v02_split", {"part": ("first + part", "first")}, WRONG),
    "each new token masked as the first": ("decode_attention-v03_packed", {"seen": ("query", "0")}, WRONG),
    "keys multiplied before they have arrived": (
        "decode_attention-v03_packed",
        {"stage_arrived": ("cp_async_wait<Shape::kStages - 2>()", "cp_async_wait<Shape::kStages - 1>()")},
        "its cp.async are in flight",
    ),
    "keys of a call with a window multiplied before they have arrived": (
        "decode_attention-v05_scored",
        {"scored_arrived": ("cp_async_wait<Shape::kStages - 2>()", "cp_async_wait<Shape::kStages - 1>()")},
        "its cp.async are in flight",
    ),
    "keys of the page before": (
        "decode_attention-v03_packed",
        {"next_page": ("look_up(piece, ahead + 1)", "look_up(piece, ahead)")},
        WRONG,
    ),
    "a base for each lane's keys": (
        "decode_attention-v03_packed",
        {"lanes_maximum": ("__shfl_xor_sync(0xffffffff, highest[c], lanes)", "highest[c]")},
        WRONG,
    ),
    "a unit copied beyond the last key": (
        "decode_attention-v03_packed",
        {"unit_end": ("row < left", "true")},
        "outside the operands",
    ),
    "a unit of rows of 96 columns copied beyond the last key": (
        "decode_attention-v03_packed",
        {"part_of_row": ("row < left", "true")},
        "outside the operands",
    ),
    "pieces of a row of 96 columns that change places": (
        "decode_attention-v03_packed",
        {"swizzled_part": ("To::at(row, at * 8)", "To::at(row, (at ^ 1) * 8)")},
        WRONG,
    ),
    "a step that no block has": (
        "decode_attention-v04_balanced",
        {"last_step": ("s.total * (worker + 1) / s.blocks", "s.total * (worker + 1) / s.blocks - 1")},
        WRONG,
    ),
    "the first block to arrive adds the parts": (
        "decode_attention-v04_balanced",
        {"last_block": ("unsigned(count - 1)", "unsigned(0)")},
        WRONG,
    ),
    "one slot for both items of a block": (
        "decode_attention-v04_balanced",
        {"slot": ("(int(blockIdx.x) == first)", "0")},
        WRONG,
    ),
    "sequences without keys not cleared": ("decode_attention-v04_balanced", {"no_keys": IF_TRUE}, WRONG),
    "scores of half of the columns": ("mla_decode-v02_split", {"columns": ("a.x + b.x", "a.x")}, WRONG),
    "scores read before all warps have left theirs": ("mla_decode-v02_split", {"scores_there": ""}, WRONG),
    "latents behind the last one as they are": ("mla_decode-v03_wgmma", {"clear_tail": ""}, WRONG),
    "exponentials in the place of keys that a warp still multiplies": (
        "mla_decode-v03_wgmma",
        {"keys_multiplied": "", "start_own": "", "publish": "publish(exponentials); start_own(exponentials);"},
        "changed while wgmma read it",
    ),
    "out at the base before its own scores": ("mla_decode-v03_wgmma", {"own_rescale": IF_FALSE}, WRONG),
    "columns of keys not waited for": (
        "mla_decode-v03_wgmma",
        {"slab_full": "wait_full(0, parity);"},
        "changed while wgmma read it",
    ),
    "the base of the other warpgroup not followed": ("mla_decode-v03_wgmma", {"follow": IF_FALSE}, WRONG),
    "the other's stage given back while a product reads it": (
        "mla_decode-v03_wgmma",
        {"product_done": ""},
        "changed while wgmma read it",
    ),
    "the sums of one warpgroup for both": (
        "mla_decode-v03_wgmma",
        {"both_sums": ("tiles.sums[row_of(r)] + tiles.sums[kRows + row_of(r)]", "tiles.sums[row_of(r)]")},
        WRONG,
    ),
    "parts added up before all are there": ("mla_decode-v03_wgmma", {"parts_there": ""}, WRONG),
    "a part of a stage given back to one producer of two": (
        "mla_decode-v04_cluster",
        {"producers": ("if (…)", "threadIdx.x % 32 == 0")},
        "wait for ever at an mbarrier",
    ),
    "half of the rows not copied to the other block": (
        "mla_decode-v04_cluster",
        {"multicast": ("(1 << kCluster) - 1", "1 << cluster_rank()")},
        "wait for ever at an mbarrier",
    ),
    "a block that ends before the other one is done": (
        "mla_decode-v04_cluster",
        {"cluster_end": ("cluster_sync_relaxed();", "")},
        "a block that has ended",
    ),
}
