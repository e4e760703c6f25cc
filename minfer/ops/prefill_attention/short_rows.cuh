// What v07_short, v11_paged_short, v14_key_parts and others share: the work of their consumer warpgroups.
#pragma once

#include "short_items.cuh"

namespace minfer {

// The registers of a consumer warpgroup, and its loop. kInHalves: when a row's base grows, out is multiplied twice by the root
// of the factor (OnlineRows::add_in_halves).
template <typename T, int kDim, typename Item = minfer::Item, bool kInHalves = false>
struct Consumer : Rows64<ShortTiles<T, kDim, Item>> {
  using Tile = ShortTiles<T, kDim, Item>;
  using Base = Rows64<Tile>;
  using typename Base::Exponentials, typename Base::Scores;
  using Base::factor, Base::online, Base::out, Base::p, Base::release, Base::tiles, Base::warpgroup;

  const int log_packed;
  uint32_t queries[kDim / 16][4];  // as fragments
  Ring<Tile::kStages> keys, values;
  uint32_t parity_of_q = 0;

  __device__ Consumer(const Tile& tiles, const Attention<T>& p, int log_packed) : Base(tiles, p), log_packed(log_packed) {}

  __device__ int first_query(const Work& w) const { return w.row0 + (warpgroup * kRows >> log_packed); }

  // Loads a tile of queries into registers, and releases its shared memory.
  __device__ void load_queries() {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    barrier_wait(tiles.full_q + warpgroup, parity_of_q);  //@ queries_read
    parity_of_q ^= 1;
    const T* rows = tiles.q + warpgroup * Tile::kQ + (warp * kRowsOfWarp + lane % 16) * 64;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step)
      ldmatrix_x4(queries[step], rows + step / 4 * (kRows * 64) + ((step % 4 * 2 + lane / 16) ^ lane % 8) * 8);
    __syncwarp();
    release(tiles.empty_q + warpgroup);
  }

  __device__ void start_scores(Scores& scores) const {
    const uint64_t cols = tile_descriptor(tiles.k + keys.stage * Tile::kKV, 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step)  // a step is 32 bytes of a row; descriptors count 16 bytes
      wgmma_registers<T, false>(scores, queries[step], cols + step / 4 * (kKeys * 8) + step % 4 * 2, step > 0);
    wgmma_commit();
  }

  // The blocks, from `begin` to before `end`, in which all rows see all keys.
  __device__ Span clear_blocks(const Work& w) const {
    const int first = first_query(w), begin = p.span(w.s, first + (kRows >> log_packed) - 1).begin;
    return {(begin + kKeys - 1) / kKeys, p.span(w.s, first).end / kKeys};
  }

  // Applies the soft cap, if there is one, and hides the scores that a row must not see.
  __device__ void mask(Scores& scores, const Work& w, int block) const {
    if (p.softcap > 0.0f) this->cap(scores);
    const Span clear = clear_blocks(w);
    if (block >= clear.begin && block < clear.end) return;
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * kRowsOfWarp + lane / 4;
    const int first = first_query(w), column = block * kKeys + lane % 4 * 2;
    //@ row_of_query
    Span spans[2] = {p.span(w.s, first + (row >> log_packed)), p.span(w.s, first + (row + 8 >> log_packed))};
    for (Span& span : spans) span.begin -= column, span.end -= column;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int key = i / 4 * 8 + i % 2;
      const Span& span = spans[i / 2 % 2];
      if (key < span.begin || key >= span.end) scores[i] = -INFINITY;
    }
  }

  // Releases blocks that only the other warpgroup multiplies. The lane that does it must not run ahead of the waiting lanes.
  __device__ void skip(int blocks) {
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      barrier_wait(tiles.full_k + keys.stage, keys.parity);
      barrier_wait(tiles.full_v + values.stage, values.parity);
      __syncwarp();
      release(tiles.empty_k + keys.stage);
      release(tiles.empty_v + values.stage);
      keys.advance(), values.advance();
    }
  }

  __device__ void start_next_scores(Scores& scores) {
    barrier_wait(tiles.full_k + keys.stage, keys.parity);
    start_scores(scores);
  }
  // Starts out (+)= exponentials v with the values of a block.
  __device__ void start_next_out(const Exponentials& exponentials, bool add) {
    barrier_wait(tiles.full_v + values.stage, values.parity);
    this->start_out(exponentials, values.stage, add);
  }
  // Waits for scores, and turns them into exponentials. Returns whether out must be multiplied by `rescale`.
  template <bool kFirst, bool kPlain>
  __device__ bool finish_scores(Scores& scores, Exponentials& exponentials, const Work& w, int block, float (&rescale)[2]) {
    wgmma_wait_for<kFirst ? 0 : 1>(scores);
    release(tiles.empty_k + keys.stage);
    keys.advance();
    if constexpr (!kPlain) mask(scores, w, block);
    if constexpr (kInHalves) return online.template add_in_halves<T, kFirst>(scores, exponentials, factor, rescale);
    else return online.template add_rounded<T, kFirst>(scores, exponentials, factor, rescale);
  }
  __device__ void finish_out() {
    wgmma_wait_for<0>(out);
    release(tiles.empty_v + values.stage);
    values.advance();
  }

  // Starts the scores of `block`, and the product of the exponentials `behind` with the values of the block behind it. The
  // softmax of these scores runs during that product, so the exponentials of the two blocks are in different registers.
  template <bool kPlain>
  __device__ void step(Scores& scores, const Exponentials& behind, Exponentials& exponentials, const Work& w, int block,
                       int end) {
    float rescale[2];
    start_next_scores(scores);
    start_next_out(behind, block + 2 < end);
    const bool grows = finish_scores<false, kPlain>(scores, exponentials, w, block, rescale);
    finish_out();
    if (grows) scale_rows(out, rescale);  //@ rescale
    if constexpr (kInHalves)
      if (grows) scale_rows(out, rescale);
  }

  // All blocks but the first one. Plain scores are neither capped nor hidden; they have a loop of their own, as in v06.
  template <bool kPlain>
  __device__ void add_blocks(Scores& scores, Exponentials (&exponentials)[2], const Work& w, const Span& seen) {
    int block = seen.end - 1;
#pragma unroll 1
    while (true) {
      if (--block < seen.begin) {
        start_next_out(exponentials[0], seen.begin + 1 < seen.end);
        break;
      }
      step<kPlain>(scores, exponentials[0], exponentials[1], w, block, seen.end);
      if (--block < seen.begin) {
        start_next_out(exponentials[1], true);
        break;
      }
      step<kPlain>(scores, exponentials[1], exponentials[0], w, block, seen.end);
    }
    finish_out();
  }

  __device__ void add_tile(const Work& w, const Span& seen) {
    Scores scores;
    Exponentials exponentials[2];
    float rescale[2];
    load_queries();
    start_next_scores(scores);
    finish_scores<true, false>(scores, exponentials[0], w, seen.end - 1, rescale);
    if (w.s.keys < seen.end * kKeys) {
      barrier_wait(tiles.full_v + values.stage, values.parity);
      this->clear_tail(w, seen.end - 1, values.stage);  //@ clear_last
    }
    const Span clear = clear_blocks(w);
    if (p.softcap <= 0.0f && clear.begin <= seen.begin && clear.end >= seen.end - 1) {
      add_blocks<true>(scores, exponentials, w, seen);
    } else {
      add_blocks<false>(scores, exponentials, w, seen);
    }
  }

  // Calls store(item) for each item, when its sums are in the registers.
  template <typename Store>
  __device__ void attend_each(Store store) {
    for (Ring<kSlots> slot;; slot.advance()) {
      barrier_wait(tiles.slots->full + slot.stage, slot.parity);
      const Item& item = tiles.slots->items[slot.stage];  // a reference: it stays in shared memory and takes no registers
      if (!item.w.exists()) break;
      const Span seen = item.seen[warpgroup];
      online = OnlineRows{};
      skip(item.loaded.end - seen.end);
      if (seen.begin < seen.end) add_tile(item.w, seen);
      skip(seen.begin - item.loaded.begin);
      store(item);
      __syncwarp();
      release(tiles.slots->empty + slot.stage);
    }
  }

  __device__ void attend(const AttentionMaps& maps) {
    attend_each([&](const Item& item) { store(maps, item.w); });
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }

  // Divides by the sums and writes the rows that exist; 0 for rows that saw no key.
  __device__ void store(const AttentionMaps& maps, const Work& w) const {
    float inverse[2], lse[2];
    online.finish(factor, inverse, lse);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = w.row0 + (warp * kRowsOfWarp >> log_packed);
    const int batch = p.packed ? 0 : w.number, rows = p.rows(w.s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + r * 8, query = first + (row >> log_packed), head = w.head + (row & (1 << log_packed) - 1);
      if (query >= w.s.queries) inverse[r] = 0.0f, lse[r] = -INFINITY;  // rows behind the sequence's queries may be NaN
      if (p.lse && lane % 4 == 0 && query < rows) *p.lse_at(batch, w.s, query, head) = lse[r];
    }
    //@ whole_queries
    if (first + (kRowsOfWarp >> log_packed) <= rows) {
      this->store_boxes(inverse, maps, batch, w.s.first_q + first, w.head, warp, lane);
    } else {  // rows at the end of a sequence, where a box would overwrite the next sequence
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + r * 8, query = first + (row >> log_packed);
        if (query >= rows) continue;
        T* to = p.out.at(batch, w.s.first_q + query, w.head + (row & (1 << log_packed) - 1)) + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j)
          round_to(*reinterpret_cast<typename Vector<T>::Pair*>(to + j * 8), this->scaled(j * 4 + r * 2, inverse),
                   this->scaled(j * 4 + r * 2 + 1, inverse));
      }
    }
  }
};

}  // namespace minfer
