// Items of v07_short, which are tiles of out: what one is, in which order thread blocks take them, and the copies for them.
#pragma once

#include "cuda/counters.cuh"
#include "cuda/tma_grouped_heads.cuh"
#include "hopper_attention.cuh"

namespace minfer {

constexpr int64_t kL2Bytes = 8 << 20;
constexpr int kWarpgroups = 2, kRowsOfItem = kWarpgroups * kRows, kThreadsOfBlock = (kWarpgroups + 1) * 128;
constexpr int kFewRegisters = 56, kMostRegisters = 224;
constexpr int kSlots = 2;        // items that are taken and not yet stored
constexpr int kMostPacked = 16;  // heads in a tile, as many as a warp has rows
constexpr int kKeys = 64;        // of a block of keys

// Rows of out for `packed` = 2^log_packed neighbouring heads from `w.head` on. Row r of a warpgroup is head r % packed of query
// r / packed. A warpgroup has 64 rows, and the queries of the second one follow those of the first. w.row0 is the first query.
// Blocks of keys are numbered from the sequence's first key.
struct Item {
  Work w;
  Span loaded, seen[kWarpgroups];  // blocks of keys: those that are copied, and those of them that each warpgroup multiplies
};

template <typename Item>
struct SlotsOf {
  Item items[kSlots];
  uint64_t full[kSlots], empty[kSlots];
};
using Slots = SlotsOf<Item>;

// A block's shared memory and barriers. An Item may be derived from the one above.
template <typename T_, int kDim_, typename Item_ = Item>
struct ShortTiles {
  using T = T_;
  using Item = Item_;
  static constexpr int kDim = kDim_, kDimV = kDim, kBlockN = kKeys, kSlabs = kDim / 64, kSlabsV = kSlabs;
  static constexpr int kOutSlabs = kSlabs, kOutSlab = kRowsOfWarp * 64;
  static constexpr int kStages = kDim == 64 ? 8 : 5;
  static constexpr int kQ = kRows * kDim, kKV = kKeys * kDim, kV = kKV, kOut = kRowsOfItem * kDim;  // elements
  static constexpr int kBarriers = 2 * kWarpgroups + 4 * kStages;
  static constexpr int kBytes = (kWarpgroups * kQ + 2 * kStages * kKV + kOut) * sizeof(T) +
                                kBarriers * sizeof(uint64_t) + sizeof(SlotsOf<Item>);
  static_assert(kBytes <= 227 << 10, "more than a block has");

  T *q, *k, *v, *out;
  uint64_t *full_q, *empty_q, *full_k, *empty_k, *full_v, *empty_v;
  SlotsOf<Item>* slots;

  __device__ explicit ShortTiles(unsigned char* shared)
      : q(reinterpret_cast<T*>(shared)), k(q + kWarpgroups * kQ), v(k + kStages * kKV), out(v + kStages * kKV),
        full_q(reinterpret_cast<uint64_t*>(out + kOut)), empty_q(full_q + kWarpgroups), full_k(empty_q + kWarpgroups),
        empty_k(full_k + kStages), full_v(empty_k + kStages), empty_v(full_v + kStages),
        slots(reinterpret_cast<SlotsOf<Item>*>(empty_v + kStages)) {}

  // One thread calls it.
  __device__ void init() const {
    for (int i = 0; i < kSlots; ++i) barrier_init(slots->full + i, 1), barrier_init(slots->empty + i, kWarpgroups * 4 + 1);
    for (int i = 0; i < kWarpgroups; ++i) barrier_init(full_q + i, 1), barrier_init(empty_q + i, 4);
    for (int i = 0; i < kStages; ++i) barrier_init(full_k + i, 1), barrier_init(empty_k + i, kWarpgroups * 4);
    for (int i = 0; i < kStages; ++i) barrier_init(full_v + i, 1), barrier_init(empty_v + i, kWarpgroups * 4);
    barrier_init_fence();
  }

  __device__ T* out_box(int warp, int slab) const { return out + (warp * kOutSlabs + slab) * kOutSlab; }

  // Waits until a stage is empty, and starts the copy of kCount rows into it.
  template <int kCount>
  __device__ static void load(T* tile, const HeadsMap& map, uint64_t* full, uint64_t* empty, uint32_t parity, int head,
                              int token, int batch) {
    barrier_wait(empty, parity ^ 1);
    barrier_expect(full, kCount * kDim * sizeof(T));
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
      tma_load_heads(tile + slab * kCount * 64, map, full, slab * 64, head, token, batch);
  }
};

// Item number `index` of `order`. A whole warp calls it.
template <typename P>
__device__ Item item_of(const P& p, int index, const Order& order, int log_packed) {
  Item item{{-1, 0, 0, {}, 0, 0}, {0, 0}, {}};
  Work& w = item.w;
  const int group = (int64_t(index / order.tiles + 1) * order.groups - 1) / order.units, first = order.first_unit(group);
  const int units = order.first_unit(group + 1) - first, within = index - first * order.tiles, unit = first + within % units;
  const int rest = within / units;  // items of the unit that come before
  const int queries = kRowsOfItem >> log_packed;
  if (p.packed) {
    w.head = unit << log_packed;
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int number = lane; w.number < 0 && number - lane < p.batch; number += 32) {  // a sequence for each lane
      const int tiles = number < p.batch ? (p.sequence(number).queries + queries - 1) / queries : 0;
      int behind = tiles;  // tiles of this sequence and of those of the lanes before
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffff, behind, step);
        if (lane >= step) behind += other;
      }
      const unsigned later = __ballot_sync(0xffffffff, before + behind > rest);
      if (later != 0) {
        const int found = __ffs(later) - 1;
        w.row0 = (before + __shfl_sync(0xffffffff, behind, found) - 1 - rest) * queries;
        w.number = number - lane + found, w.s = p.sequence(w.number);
      }
      before += __shfl_sync(0xffffffff, behind, 31);
    }
    if (w.number < 0) return item;
  } else {
    const int units_of_sequence = p.heads >> log_packed;
    w.number = unit / units_of_sequence, w.head = unit % units_of_sequence << log_packed, w.s = p.sequence(w.number);
    w.row0 = (order.tiles - 1 - rest) * queries;
  }
  bool any = false;
#pragma unroll
  for (int i = 0; i < kWarpgroups; ++i) {
    const int from = w.row0 + i * queries / kWarpgroups, to = min(from + queries / kWarpgroups, w.s.queries);
    const int begin = p.span(w.s, from).begin, end = p.span(w.s, to - 1).end;
    if (from >= to || begin >= end) continue;  // rows that see nothing
    const Span seen = {begin / kKeys, (end + kKeys - 1) / kKeys};
    item.seen[i] = seen;
    item.loaded = any ? Span{min(item.loaded.begin, seen.begin), max(item.loaded.end, seen.end)} : seen;
    any = true;
  }
#pragma unroll
  for (Span& seen : item.seen)
    if (seen.begin >= seen.end) seen = {item.loaded.begin, item.loaded.begin};
  return item;
}

// All items; some indices have none.
template <typename P>
struct Items {
  const P& p;
  const Order& order;
  const int log_packed;

  __device__ int count() const { return order.pieces(); }
  __device__ Item operator[](int index) const { return item_of(p, index, order, log_packed); }
};
template <typename P>
Items(const P&, const Order&, int) -> Items<P>;

// Takes items for the copying thread and the consumers, until there are none. The first item of a thread block has the block's
// own number. `drawn` counts the others that all blocks have taken; the last one wraps it to zero. A whole warp calls it.
template <typename Tile, typename All>
__device__ void take_items(const Tile& tile, const All& all, unsigned* drawn) {
  const bool is_first_lane = threadIdx.x % 32 == 0;
  int index = blockIdx.x;
  for (Ring<kSlots> slot;; slot.advance()) {
    barrier_wait(tile.slots->empty + slot.stage, slot.parity ^ 1);
    typename Tile::Item item{};
    item.w.number = -1;
    while (index < all.count() && !item.w.exists()) {
      item = all[index];
      if (is_first_lane) index = gridDim.x + atomicInc(drawn, all.count() - 1);
      index = __shfl_sync(0xffffffff, index, 0);
    }
    if (is_first_lane) {
      tile.slots->items[slot.stage] = item;
      barrier_arrive(tile.slots->full + slot.stage);
    }
    if (!item.w.exists()) return;
  }
}

// Copies the operands of one item after the other. One thread calls it.
template <typename Tile, typename T>
__device__ void copy_items(const Tile& tile, const Attention<T>& p, const AttentionMaps& maps, int log_packed) {
  tma_prefetch(maps.q), tma_prefetch(maps.k), tma_prefetch(maps.v);
  Ring<Tile::kStages> keys, values;
  uint32_t parity_of_q[kWarpgroups] = {};
  for (Ring<kSlots> slot;; slot.advance()) {
    barrier_wait(tile.slots->full + slot.stage, slot.parity);
    const typename Tile::Item& item = tile.slots->items[slot.stage];
    const Work& w = item.w;
    if (!w.exists()) return;
    const int batch = p.packed ? 0 : w.number, head = p.kv_head(w.head);
#pragma unroll
    for (int i = 0; i < kWarpgroups; ++i) {
      if (item.seen[i].begin >= item.seen[i].end) continue;
      const int query = w.row0 + (i * kRows >> log_packed);
      Tile::template load<kRows>(tile.q + i * Tile::kQ, maps.q, tile.full_q + i, tile.empty_q + i, parity_of_q[i], w.head,
                                 w.s.first_q + query, batch);
      parity_of_q[i] ^= 1;
    }
    // In the order in which the consumers release stages: the scores of a block come before the product with the values of the
    // one before it.
#pragma unroll 1
    for (int block = item.loaded.end; block >= item.loaded.begin; --block) {
      if (block > item.loaded.begin) {
        Tile::template load<kKeys>(tile.k + keys.stage * Tile::kKV, maps.k, tile.full_k + keys.stage,
                                     tile.empty_k + keys.stage, keys.parity, head, w.token(block - 1, kKeys), batch);
        keys.advance();
      }
      if (block < item.loaded.end) {
        Tile::template load<kKeys>(tile.v + values.stage * Tile::kKV, maps.v, tile.full_v + values.stage,
                                     tile.empty_v + values.stage, values.parity, head, w.token(block, kKeys), batch);
        values.advance();
      }
    }
    barrier_arrive(tile.slots->empty + slot.stage);
  }
}

// The logarithm to base 2 of how many heads, which share keys, are packed into a tile.
template <typename T>
int find_log_packed(const Attention<T>& p) {
  int log_packed = 0;
  while (2 << log_packed <= kMostPacked && p.heads / p.kv_heads % (2 << log_packed) == 0) ++log_packed;
  return log_packed;
}

// The order of v06, for items instead of tiles.
template <typename T>
Order make_packed_order(const Attention<T>& p, int log_packed) {
  const int queries = kRowsOfItem >> log_packed;
  const int64_t whole = (int64_t(p.seq_q) + queries - 1) / queries, of_sequence = p.heads >> log_packed;
  const int64_t tiles = p.packed ? whole + p.batch : whole, units = p.packed ? of_sequence : p.batch * of_sequence;
  STD_TORCH_CHECK(tiles * units < INT_MAX, "prefill_attention: more tiles of out than fit 32 bits");
  const int64_t bytes = int64_t(p.seq_kv) * (p.dim + p.v_dim) * sizeof(T) * p.kv_heads / of_sequence;
  const int64_t of_l2 = kL2Bytes / std::max<int64_t>(bytes, 1), of_wave = multiprocessors() / std::max<int64_t>(tiles, 1);
  const int64_t most = std::max<int64_t>({1, of_l2, of_wave});
  return {static_cast<int>(units), static_cast<int>(tiles), static_cast<int>((units + most - 1) / most)};
}

template <typename P>
AttentionMaps make_packed_maps(const P& p, int block_n, int packed) {
  require_vectors(p);
  AttentionMaps maps;
  const int batch = p.packed ? 1 : p.batch;
  const auto make = [&](HeadsMap& map, const auto& of, int dim, int blocks, int tokens, int heads, int rows, int packed) {
    return make_grouped_heads_map(map, of.begin, blocks, tokens, heads, dim, of.of_outer, of.of_inner, of.of_head,
                                  rows / packed, packed);
  };
  // Without any keys there is no tensor map, and no block uses one.
  STD_TORCH_CHECK(make(maps.q, p.q, p.dim, batch, p.seq_q, p.heads, kRows, packed) &&
                      make(maps.out, p.out, p.v_dim, batch, p.seq_q, p.heads, kRowsOfWarp, packed) &&
                      (p.seq_kv == 0 || (make(maps.k, p.k, p.dim, p.blocks(), p.slots(), p.kv_heads, block_n, 1) &&
                                         make(maps.v, p.v, p.v_dim, p.blocks(), p.slots(), p.kv_heads, block_n, 1))),
                  "prefill_attention: the driver knows no tensor map for these tensors; it must be one of CUDA 12 or newer, "
                  "and strides under 2^39 elements");
  return maps;
}

}  // namespace minfer
