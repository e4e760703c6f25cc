"""Those of `tests.emulator.mistakes` that are planted in attention."""

from __future__ import annotations

WRONG = ""
BROKEN = {
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
    "rows without a key written before q has arrived": (
        "prefill_attention-v03_mma",
        {"if («begin >= end») __syncthreads": "false"},
        WRONG,
    ),
    "values behind the last one as they are": (
        "prefill_attention-v04_wgmma",
        {"rows.clear_tail(w, i, ring.stage);": ""},
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
    "a slab of out filled while TMA reads it": (
        "prefill_attention-v05_pingpong",
        {"tma_store_wait<Tile::kOutSlabs - 1>()": "tma_store_wait<Tile::kOutSlabs>()"},
        "changes while TMA stores it",
    ),
    "rows stored over the next sequence's": (
        "prefill_attention-v04_wgmma",
        {"if («first + kRowsOfWarp <= p.rows(w.s)») store_boxes": "true"},
        WRONG,
    ),
    "out at the base before, with no maximum": (
        "prefill_attention-v06_no_maximum",
        {"if («grows») scale_rows": "false"},
        WRONG,
    ),
    "powers too large for their type": (
        "prefill_attention-v06_no_maximum",
        {"«!(part[0] <= kMost && part[1] <= kMost)») != 0": "false"},
        WRONG,
    ),
    "a tile multiplied before its queries have arrived": (
        "prefill_attention-v06_no_maximum",
        {"barrier_wait(tile.full_q + of_q, number / Tile::kTilesOfQ % 2);": ""},
        "changed while wgmma read it",
    ),
    "the sums of the tile before": (
        "prefill_attention-v06_no_maximum",
        {"1 - kStage, «block + 2 < w.blocks»);": "true"},
        WRONG,
    ),
    "every new token sees all keys": (
        "decode_attention-v01_naive",
        {"p.seen(«query», p.keys(number))": "p.new_tokens - 1"},
        WRONG,
    ),
    "powers replaced while they are read": (
        "decode_attention-v01_naive",
        {"«__syncthreads();»  // q has arrived": ""},
        WRONG,
    ),
    "parts added without regard to their bases": (
        "decode_attention-v02_split",
        {"weight = «exp2_approx(stats[i].x - zero)»;": "1.0f"},
        WRONG,
    ),
    "keys read beyond the last": ("decode_attention-v02_split", {"if («key >= end») {": "false"}, "outside operand"),
    "a part of keys for all": (
        "decode_attention-v02_split",
        {"[=](int part) { return «first + part»; }": "first"},
        WRONG,
    ),
    "each new token masked as the first": (
        "decode_attention-v03_packed",
        {"p.seen(«query», piece.keys)": "0"},
        WRONG,
    ),
    "keys multiplied before they have arrived": (
        "decode_attention-v03_packed",
        {"cp_async_wait<Shape::kStages - 2>()": "cp_async_wait<Shape::kStages - 1>()"},
        "its cp.async are in flight",
    ),
    "keys of the page before": ("decode_attention-v03_packed", {"next = look_up(piece, «ahead + 1»);": "ahead"}, WRONG),
    "a base for each lane's keys": (
        "decode_attention-v03_packed",
        {"fmaxf(highest[c], «__shfl_xor_sync(0xffffffff, highest[c], lanes)»)": "highest[c]"},
        WRONG,
    ),
    "a unit copied beyond the last key": (
        "decode_attention-v03_packed",
        {"p.k.of_inner, «row < left»)": "true"},
        "outside the operands",
    ),
    "a step that no block has": (
        "decode_attention-v04_balanced",
        {"s.end = «s.total * (worker + 1) / s.blocks»;": "s.total * (worker + 1) / s.blocks - 1"},
        WRONG,
    ),
    "the first block to arrive adds the parts": (
        "decode_attention-v04_balanced",
        {"unsigned(«count - 1»);": "0"},
        WRONG,
    ),
    "one slot for both items of a block": (
        "decode_attention-v04_balanced",
        {"2 * blockIdx.x + «(int(blockIdx.x) == first)»": "0"},
        WRONG,
    ),
    "sequences without keys not cleared": (
        "decode_attention-v04_balanced",
        {"if («p.keys(number) > 0») continue;": "true"},
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
        {
            "«named_barrier_sync(kAlone + self, 128);»  // all": "",
            "start_own(powers);\n      publish(powers);": "publish(powers); start_own(powers);",
        },
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
        {"wgmma_wait_for<kSlabs - kSlabsOfHalf>(out);": ""},
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
