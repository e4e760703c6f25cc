// What v13_wide_heads and v17_wide_parts share: the work of their consumer warpgroups.
#pragma once

#include "wide_tiles.cuh"

namespace minfer {

template <typename T, int kDim, int kDimV, typename Item = Work>
struct WideConsumer {
  using Tile = WideTiles<T, kDim, kDimV, Item>;
  using Rows = Rows64<Tile>;
  using Exponentials = typename Rows::Exponentials;
  using Scores = typename Rows::Scores;

  const Tile& tile;
  const Attention<T>& p;
  Rows rows;
  Ring<Tile::kStages> ring;
  uint32_t parity_of_q = 0;

  __device__ WideConsumer(const Tile& tile, const Attention<T>& p) : tile(tile), p(p), rows(tile, p) {}

  // Waits for this warpgroup's turn to start products; ends the turn.
  __device__ void begin_turn() const { named_barrier_sync(kTurnBarrier + rows.warpgroup, 256); }
  __device__ void end_turn() const { named_barrier_arrive(kTurnBarrier + 1 - rows.warpgroup, 256); }

  // Each warp copies its own rows, when TMA has read its rows of out from there.
  __device__ void load_q(const AttentionMaps& maps, const Work& w) const {
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
      uint64_t* full = tile.full_q + rows.warpgroup;
      tma_store_wait<0>();  //@ out_read
      barrier_expect(full, kRowsOfWarp * kDim * sizeof(T));
      for (int slab = 0; slab < Tile::kSlabs; ++slab)
        tma_load_heads(tile.out_box(warp, slab), maps.q, full, slab * 64, w.head, w.s.first_q + w.row0 + warp * kRowsOfWarp,
                       p.packed ? 0 : w.number);
    }
    __syncwarp();
  }

  // Starts out += exponentials v for the values of the ring's next piece, or scores += q kᵀ for the columns in it.
  __device__ void start_out(const Exponentials& exponentials, int number) {
    const uint64_t values = tile_descriptor(tile.piece(ring.stage), Tile::kValues * 128, 1024);
    constexpr int kSteps = Tile::kValues / 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma_registers_wide<T, true>(rows.out, exponentials[number * kSteps + step], values + step * 128, true);
  }
  __device__ void start_scores(Scores& scores, int slab) const {
    const uint64_t queries = tile_descriptor(tile.q + (slab * kBlockM + rows.warpgroup * kRows) * 64, 16, 1024);
    const uint64_t keys = tile_descriptor(tile.piece(ring.stage), 16, 1024);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma<T, false>(scores, queries + step * 2, keys + step * 2, slab > 0 || step > 0);
  }

  // A turn. The products with a piece run while those with the next are started; then the piece is given back. The other
  // warpgroup's turn begins while the last ones run.
  template <bool kOut, bool kScores>
  __device__ void multiply(const Exponentials& exponentials, Scores& scores) {
    constexpr int kOfOut = kOut ? Tile::kPiecesOfV : 0, kGroups = kOfOut + (kScores ? Tile::kSlabs : 0);
    int before = 0;
    begin_turn();
#pragma unroll
    for (int group = 0; group < kGroups; ++group, ring.advance()) {
      barrier_wait(tile.full + ring.stage, ring.parity);  //@ piece_arrived
      wgmma_fence();
      if (group < kOfOut) start_out(exponentials, group);
      else start_scores(scores, group - kOfOut);
      wgmma_commit();
      if (group > 0) {
        wgmma_wait<1>();  //@ piece_done
        rows.release(tile.empty + before);
      }
      before = ring.stage;
    }
    end_turn();
    if constexpr (kOut) wgmma_wait_for<0>(rows.out);
    if constexpr (kScores) wgmma_wait_for<0>(scores);
    rows.release(tile.empty + before);
  }

  // Makes the scores of a block exponentials. kFirst: out is still zero.
  template <bool kFirst, bool kPlain>
  __device__ void soften(Exponentials& exponentials, Scores& scores, const Work& w, int block) {
    float rescale[2];
    if constexpr (!kPlain) rows.mask(scores, w, block);
    const bool grows = rows.online.add(scores, rows.factor, rescale);
    if constexpr (!kFirst) {
      if (grows) scale_rows(rows.out, rescale);  //@ sums_rescaled
    }
    rows.round(exponentials, scores);
  }

  // Rows64::clear_tail for the values of the block that is multiplied first, which has the sequence's last keys. They are the
  // ring's next pieces.
  __device__ void clear_tail(const Work& w) const {
    Ring<Tile::kStages> next = ring;
    for (int i = 0; i < Tile::kPiecesOfV; ++i, next.advance()) {
      barrier_wait(tile.full + next.stage, next.parity);
      const int left = w.s.keys - (w.first_block + w.blocks - 1) * Tile::kBlockN - i * Tile::kValues;
      const int first = min(max(left, 0), Tile::kValues) * 8;  // of pieces of 16 bytes
      for (int slab = 0; slab < Tile::kSlabsV; ++slab)
        for (int at = first + threadIdx.x % 128; at < Tile::kValues * 8; at += 128)
          reinterpret_cast<uint4*>(tile.piece(next.stage) + slab * Tile::kValues * 64)[at] = uint4{};
    }
    fence_async();
    named_barrier_sync(kTailBarrier + rows.warpgroup, 128);
  }

  // All blocks but the one that is multiplied first. Blocks are taken from the last to the first.
  template <bool kPlain>
  __device__ void add_blocks(Exponentials& exponentials, const Work& w) {
#pragma unroll 1
    for (int block = w.blocks - 2; block >= 0; --block) {
      Scores scores;
      multiply<true, true>(exponentials, scores);
      soften<false, kPlain>(exponentials, scores, w, block);
    }
  }

  __device__ void add_tile(const Work& w) {
    Exponentials exponentials;
    Scores scores;
    multiply<false, true>(exponentials, scores);
    soften<true, false>(exponentials, scores, w, w.blocks - 1);
    if (rows.has_tail(w, w.blocks - 1)) clear_tail(w);  //@ clear_tail
    const Span clear = rows.clear_blocks(w);
    if (p.softcap <= 0.0f && clear.begin <= 0 && clear.end >= w.blocks - 1) add_blocks<true>(exponentials, w);
    else add_blocks<false>(exponentials, w);
    multiply<true, false>(exponentials, scores);
  }

  // Calls store(item) for each item, when its sums are in the registers. A warp may then write over its rows of q: its
  // warpgroup has done its last product with q before its last turn.
  template <typename Store>
  __device__ void attend_each(const AttentionMaps& maps, Store store) {
    if (rows.warpgroup == 1) end_turn();  // the first turn is the other one's
    for (Ring<kSlots> slot;; slot.advance()) {
      barrier_wait(tile.slots->full + slot.stage, slot.parity);
      const Item& w = tile.slots->work[slot.stage];  // stays in shared memory, and takes no registers
      if (!w.exists()) break;
      rows.clear();
      if (w.blocks > 0) {
        load_q(maps, w);
        barrier_wait(tile.full_q + rows.warpgroup, parity_of_q);
        parity_of_q ^= 1;
        add_tile(w);
      }
      store(w);
      __syncwarp();
      rows.release(tile.slots->empty + slot.stage);
    }
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
    if (rows.warpgroup == 0) begin_turn();  // takes the turn that the other one has ended, so that none is left
  }

  // A warp writes its rows of out over its rows of q.
  __device__ void attend(const AttentionMaps& maps) {
    attend_each(maps, [&](const Work& w) { rows.store(maps, w); });
  }
};

}  // namespace minfer
