// The shared memory of v08_compact and v13_three_warpgroups, one ring of stages, and the warps that fill it. Items are as those
// of v07_short, with 64 rows for each warpgroup.
#pragma once

#include "short_items.cuh"

namespace minfer {

template <int kConsumers>
__device__ bool sees(const ItemOf<kConsumers>& item, int warpgroup) {
  return item.seen[warpgroup].begin < item.seen[warpgroup].end;
}

// A block's shared memory and barriers. One ring of stages holds the queries of each warpgroup, the keys and the values, in the
// order in which an item needs them. So the queries of short items are loaded several items ahead.
template <typename T_, int kDim_, int kConsumers_>
struct RingTiles {
  using T = T_;
  static constexpr int kConsumers = kConsumers_, kThreads = (kConsumers + 1) * 128, kRowsOfItem = kConsumers * kRows;
  static constexpr int kDim = kDim_, kDimV = kDim, kBlockN = kKeys, kSlabs = kDim / 64, kSlabsV = kSlabs;
  static constexpr int kOutSlabs = kSlabs, kOutSlab = kRowsOfWarp * 64;
  static constexpr int kStages = kDim == 64 ? 20 : kConsumers == 2 ? 12 : 11;
  static constexpr int kKV = kKeys * kDim, kV = kKV, kOut = kRowsOfItem * kDim;  // elements
  static constexpr int kBytes = (kStages * kKV + kOut) * sizeof(T) + 2 * kStages * sizeof(uint64_t) + sizeof(SlotsOf<kConsumers>);
  static_assert(kRows == kKeys, "a stage is as large as the queries of a warpgroup");
  static_assert(kBytes <= 227 << 10, "more than a block has");

  T *v, *out;  // v: the ring
  uint64_t *full, *empty;
  SlotsOf<kConsumers>* slots;

  __device__ explicit RingTiles(unsigned char* shared)
      : v(reinterpret_cast<T*>(shared)), out(v + kStages * kKV), full(reinterpret_cast<uint64_t*>(out + kOut)),
        empty(full + kStages), slots(reinterpret_cast<SlotsOf<kConsumers>*>(empty + kStages)) {}

  // A whole warp calls it: a lane for each stage.
  __device__ void init() const {
    const int lane = threadIdx.x % 32;
    static_assert(kStages <= 32);
    if (lane < kSlots) barrier_init(slots->full + lane, 1), barrier_init(slots->empty + lane, kConsumers * 4 + 1);
    if (lane < kStages) barrier_init(full + lane, 1), barrier_init(empty + lane, kConsumers * 4);
    barrier_init_fence();
  }

  // Waits until the stage is empty, and starts the copy of 64 rows into it.
  __device__ void load(Ring<kStages>& ring, const HeadsMap& map, int head, int token, int batch) const {
    barrier_wait(empty + ring.stage, ring.parity ^ 1);
    barrier_expect(full + ring.stage, kKV * sizeof(T));
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
      tma_load_heads(v + ring.stage * kKV + slab * kKeys * 64, map, full + ring.stage, slab * 64, head, token, batch);
    ring.advance();
  }
};

// Takes items for the copying thread and the consumers, until there are none. The first item of a thread block has the block's
// own number. `drawn` counts the others that all blocks have taken; the last one wraps it to zero. A whole warp calls it. It
// finds its first item while other warps prepare the barriers, and hands an item over before it waits for the next number. Each
// step is in the code once, because a second copy would have to come from memory, too.
template <typename Tile, typename T>
__device__ void hand_over_items(const Tile& tile, const Attention<T>& p, const Order& order, int log_packed, unsigned* drawn) {
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const int queries = Tile::kRowsOfItem >> log_packed;
  bool prepared = false;
  Ring<kSlots> slot;
#pragma unroll 1
  for (int index = blockIdx.x;;) {
    Work w{-1, 0, 0, {}, 0, 0};
    if (index < order.pieces()) w = work_of_item(p, index, order, log_packed, queries);
    if (!prepared) __syncthreads();  // from here on the barriers are prepared
    prepared = true;
    if (w.exists() || index >= order.pieces()) {
      barrier_wait(tile.slots->empty + slot.stage, slot.parity ^ 1);
      if (is_first_lane) {
        auto& item = tile.slots->items[slot.stage];
        item.w = w;
        if (w.exists()) item.find_blocks(p, queries);
        barrier_arrive(tile.slots->full + slot.stage);
      }
      slot.advance();
    }
    if (index >= order.pieces()) return;
    if (is_first_lane) index = gridDim.x + atomicInc(drawn, order.pieces() - 1);
    index = __shfl_sync(0xffffffff, index, 0);
  }
}

// Copies the operands of one item after the other. One thread calls it.
template <typename Tile, typename T>
__device__ void copy_to_ring(const Tile& tile, const Attention<T>& p, const AttentionMaps& maps, int log_packed) {
  Ring<Tile::kStages> ring;
  for (Ring<kSlots> slot;; slot.advance()) {
    barrier_wait(tile.slots->full + slot.stage, slot.parity);
    const auto& item = tile.slots->items[slot.stage];
    const Work& w = item.w;
    if (!w.exists()) return;
    const int batch = p.packed ? 0 : w.number, head = p.kv_head(w.head);
#pragma unroll
    for (int i = 0; i < Tile::kConsumers; ++i)
      if (sees(item, i)) tile.load(ring, maps.q, w.head, w.s.first_q + w.row0 + (i * kRows >> log_packed), batch);
#pragma unroll 1
    for (int block = item.loaded.end - 1; block >= item.loaded.begin; --block) {
      tile.load(ring, maps.k, head, w.token(block, kKeys), batch);
      tile.load(ring, maps.v, head, w.token(block, kKeys), batch);
    }
    barrier_arrive(tile.slots->empty + slot.stage);
  }
}

}  // namespace minfer
