// What shared memory has in v13_wide_heads and v17_wide_parts, and the thread that fills it.
#pragma once

#include "no_maximum.cuh"

namespace minfer {

using namespace no_maximum;

constexpr int kKeys = 128;  // in a block of keys

// Items that the producer has taken, for the consumers to read. An item is a Work, or is derived from it.
template <typename Item>
struct SlotsOf {
  Item work[kSlots];
  uint64_t full[kSlots], empty[kSlots];
};

// A thread block's shared memory and barriers: q, over which out is written, and a ring of pieces of keys and values. All are
// in slabs of 64 columns, in the 128-byte swizzle.
template <typename T_, int kDim_, int kDimV_, typename Item_ = Work>
struct WideTiles {
  using T = T_;
  using Item = Item_;
  using Slots = SlotsOf<Item>;
  static constexpr int kDim = kDim_, kDimV = kDimV_, kBlockN = kKeys, kSlabs = kDim / 64, kSlabsV = kDimV / 64;
  static constexpr int kOutSlabs = kSlabsV;
  static constexpr int kValues = kBlockN % 32 == 0 ? 32 : 16, kPiecesOfV = kBlockN / kValues;  // rows of a piece; pieces
  static constexpr int kQ = kBlockM * kDim, kPiece = std::max(kBlockN * 64, kValues * kDimV);  // elements
  static constexpr int kStages = ((227 << 10) - kQ * sizeof(T) - sizeof(Slots) - 16) / (kPiece * sizeof(T) + 16);
  static constexpr int kBytes = (kQ + kStages * kPiece) * sizeof(T) + (kConsumers + 2 * kStages) * 8 + sizeof(Slots);
  static_assert(kBytes <= 227 << 10 && kStages > kSlabs + kPiecesOfV && kDimV <= kDim);

  T *q, *pieces;
  uint64_t *full_q, *full, *empty;
  Slots* slots;

  __device__ explicit WideTiles(unsigned char* shared)
      : q(reinterpret_cast<T*>(shared)), pieces(q + kQ), full_q(reinterpret_cast<uint64_t*>(pieces + kStages * kPiece)),
        full(full_q + kConsumers), empty(full + kStages), slots(reinterpret_cast<Slots*>(empty + kStages)) {}

  // One thread.
  __device__ void init() const {
    for (int i = 0; i < kConsumers; ++i) barrier_init(full_q + i, 4);
    for (int i = 0; i < kStages; ++i) barrier_init(full + i, 1), barrier_init(empty + i, kConsumers * 4);
    for (int i = 0; i < kSlots; ++i) barrier_init(slots->full + i, 1), barrier_init(slots->empty + i, kConsumers * 4);
    barrier_init_fence();
  }

  __device__ T* piece(int stage) const { return pieces + stage * kPiece; }
  // Where a warp has 64 columns of its 16 rows of q, and later of out.
  __device__ T* out_box(int warp, int slab) const { return q + (slab * kBlockM + warp * kRowsOfWarp) * 64; }
};

// All tiles of `order`; some indices have none.
template <typename P>
struct WholeTiles {
  const P& p;
  const Order& order;

  __device__ int count() const { return order.pieces(); }
  __device__ Work operator[](int index) const { return work_of<kKeys>(p, index, order); }
};
template <typename P>
WholeTiles(const P&, const Order&) -> WholeTiles<P>;

// Takes items as v06 takes tiles, and copies keys and values in the order in which a warpgroup multiplies them.
template <typename Tile, typename T, typename All>
__device__ void produce(const Tile& tile, const Attention<T>& p, const AttentionMaps& maps, const All& all, unsigned* drawn) {
  using Item = typename Tile::Item;
  tma_prefetch(maps.q), tma_prefetch(maps.k), tma_prefetch(maps.v);
  Ring<Tile::kStages> ring;
  Ring<kSlots> slot;
  bool first = true;
  const auto take = [&] {
    Item w{};
    w.number = -1;
    for (int index = 0; !w.exists() && index < all.count();) {
      index = first ? blockIdx.x : gridDim.x + atomicInc(drawn, all.count() - 1);
      first = false;
      if (index < all.count()) w = all[index];
    }
    barrier_wait(tile.slots->empty + slot.stage, slot.parity ^ 1);
    tile.slots->work[slot.stage] = w;
    barrier_arrive(tile.slots->full + slot.stage);
    slot.advance();
    return w;
  };
  for (Item w = take(); w.exists();) {
    const int head = p.kv_head(w.head), batch = p.packed ? 0 : w.number;
    const auto expect = [&](int bytes) {
      barrier_wait(tile.empty + ring.stage, ring.parity ^ 1);
      barrier_expect(tile.full + ring.stage, bytes);
    };
    const auto load_keys = [&](int block) {
      for (int slab = 0; slab < Tile::kSlabs; ++slab, ring.advance()) {
        expect(Tile::kBlockN * 64 * sizeof(T));
        tma_load_heads(tile.piece(ring.stage), maps.k, tile.full + ring.stage, slab * 64, head, w.token(block, Tile::kBlockN),
                       batch);
      }
    };
    const auto load_values = [&](int block) {
      for (int i = 0; i < Tile::kPiecesOfV; ++i, ring.advance()) {
        expect(Tile::kValues * Tile::kDimV * sizeof(T));
        for (int slab = 0; slab < Tile::kSlabsV; ++slab)
          tma_load_heads(tile.piece(ring.stage) + slab * Tile::kValues * 64, maps.v, tile.full + ring.stage, slab * 64, head,
                         w.token(block, Tile::kBlockN) + i * Tile::kValues, batch);
      }
    };
    if (w.blocks > 0) load_keys(w.blocks - 1);
#pragma unroll 1
    for (int block = w.blocks - 1; block > 0; --block) load_values(block), load_keys(block - 1);
    const Item next = take();
    if (w.blocks > 0) load_values(0);
    w = next;
  }
}

}  // namespace minfer
