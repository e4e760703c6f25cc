// The shared memory of v08_compact, one ring of stages, and the warps that fill it. Items are those of v07_short.
#pragma once

#include "short_items.cuh"

namespace minfer {

__device__ inline bool sees(const Item& item, int warpgroup) {
  return item.seen[warpgroup].begin < item.seen[warpgroup].end;
}

// A block's shared memory and barriers. One ring of stages holds the queries of each warpgroup, the keys and the values, in the
// order in which an item needs them. So the queries of short items are loaded several items ahead. A stage has slabs of 64
// rows and 64 columns, in the 128-byte swizzle. Heads of 96 fill half of their second slab, as in Tiles. Values of 128 beside
// keys of 192 leave the third slab as it is.
template <typename T_, int kDim_, int kDimV_>
struct RingTiles {
  using T = T_;
  static constexpr int kDim = kDim_, kDimV = kDimV_, kBlockN = kKeys, kSlabs = (kDim + 63) / 64, kSlabsV = (kDimV + 63) / 64;
  static constexpr int kOutSlab = kRowsOfWarp * 64;
  static constexpr int kStages = kSlabs == 1 ? 20 : kSlabs == 2 ? 12 : 8;
  static constexpr int kKV = kKeys * kSlabs * 64, kV = kKV, kOut = kRowsOfItem * kSlabsV * 64;  // elements; kKV: of a stage
  static constexpr int kBytes = (kStages * kKV + kOut) * sizeof(T) + 2 * kStages * sizeof(uint64_t) + sizeof(Slots);
  static_assert(kRows == kKeys && kDimV <= kDim, "a stage is as large as the queries of a warpgroup");
  static_assert(kBytes <= 227 << 10, "more than a block has");

  T *v, *out;  // v: the ring
  uint64_t *full, *empty;
  Slots* slots;

  __device__ explicit RingTiles(unsigned char* shared)
      : v(reinterpret_cast<T*>(shared)), out(v + kStages * kKV), full(reinterpret_cast<uint64_t*>(out + kOut)),
        empty(full + kStages), slots(reinterpret_cast<Slots*>(empty + kStages)) {}

  // A whole warp calls it: a lane for each stage.
  __device__ void init() const {
    const int lane = threadIdx.x % 32;
    static_assert(kStages <= 32);
    if (lane < kSlots) barrier_init(slots->full + lane, 1), barrier_init(slots->empty + lane, kWarpgroups * 4 + 1);
    if (lane < kStages) barrier_init(full + lane, 1), barrier_init(empty + lane, kWarpgroups * 4);
    barrier_init_fence();
  }

  // Waits until the stage is empty, and starts the copy of kCount slabs into it.
  template <int kCount>
  __device__ void load(Ring<kStages>& ring, const HeadsMap& map, int head, int token, int batch) const {
    barrier_wait(empty + ring.stage, ring.parity ^ 1);
    barrier_expect(full + ring.stage, kKeys * kCount * 64 * sizeof(T));
#pragma unroll
    for (int slab = 0; slab < kCount; ++slab)
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
  const int pieces = order.pieces();
  bool prepared = false;
  Ring<kSlots> slot;
#pragma unroll 1
  for (int index = blockIdx.x;;) {
    Item item{{-1, 0, 0, {}, 0, 0}, {0, 0}, {}};
    if (index < pieces) item = item_of(p, index, order, log_packed);
    if (!prepared) __syncthreads();  // from here on the barriers are prepared
    prepared = true;
    if (item.w.exists() || index >= pieces) {
      barrier_wait(tile.slots->empty + slot.stage, slot.parity ^ 1);
      if (is_first_lane) {
        tile.slots->items[slot.stage] = item;
        barrier_arrive(tile.slots->full + slot.stage);
      }
      slot.advance();
    }
    if (index >= pieces) return;
    if (is_first_lane) index = gridDim.x + atomicInc(drawn, pieces - 1);
    index = __shfl_sync(0xffffffff, index, 0);
  }
}

// Copies the operands of one item after the other. One thread calls it.
template <typename Tile, typename T>
__device__ void copy_to_ring(const Tile& tile, const Attention<T>& p, const AttentionMaps& maps, int log_packed) {
  constexpr int kSlabs = Tile::kSlabs, kSlabsV = Tile::kSlabsV;
  Ring<Tile::kStages> ring;
  for (Ring<kSlots> slot;; slot.advance()) {
    barrier_wait(tile.slots->full + slot.stage, slot.parity);
    const Item& item = tile.slots->items[slot.stage];
    const Work& w = item.w;
    if (!w.exists()) return;
    const int batch = p.packed ? 0 : w.number, head = p.kv_head(w.head);
#pragma unroll
    for (int i = 0; i < kWarpgroups; ++i)
      if (sees(item, i))
        tile.template load<kSlabs>(ring, maps.q, w.head, w.s.first_q + w.row0 + (i * kRows >> log_packed), batch);
#pragma unroll 1
    for (int block = item.loaded.end - 1; block >= item.loaded.begin; --block) {
      tile.template load<kSlabs>(ring, maps.k, head, w.token(block, kKeys), batch);
      tile.template load<kSlabsV>(ring, maps.v, head, w.token(block, kKeys), batch);
    }
    barrier_arrive(tile.slots->empty + slot.stage);
  }
}

}  // namespace minfer
