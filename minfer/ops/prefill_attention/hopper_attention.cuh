// What the Hopper kernels share: tiles in shared memory that a producer thread fills by TMA, and the work of a consumer
// warpgroup.
//
// A block computes 128 rows of out for one head, 64 in each of two warpgroups; a third warpgroup has the thread that copies.
// Keys and values come in blocks of kBlockN, the last one first, because a causal mask cuts that one.
#pragma once

#include <algorithm>

#include "cuda/hopper.cuh"
#include "cuda/named_barrier.cuh"
#include "cuda/pipeline.cuh"
#include "cuda/softmax.cuh"
#include "cuda/tma_heads.cuh"
#include "cuda/wgmma_registers_wide.cuh"
#include "prefill_attention.h"

namespace minfer {

constexpr int kConsumers = 2, kRows = 64, kRowsOfWarp = 16, kBlockM = kConsumers * kRows, kThreads = (kConsumers + 1) * 128;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kTailBarrier = 2;  // named barriers: one for each consumer warpgroup from here on

struct AttentionMaps {
  HeadsMap q, k, v, out;
};

// 128 rows of out.
struct Work {
  int number, head, row0;
  Sequence s;
  int first_block, blocks;  // blocks of keys that any of the rows sees, from first_block on

  __device__ bool exists() const { return number >= 0; }
  __device__ int token(int block, int block_n) const { return s.first_kv + (first_block + block) * block_n; }
};

// In which order blocks take tiles. A unit is a head of a sequence, or of all packed sequences. `tiles` are those of a unit,
// for packed sequences an upper limit, because the host does not know their lengths. A group of units is finished before the
// next is begun, so that the L2 keeps its keys and values. Within a group, the last tiles of all units come first: with a
// causal mask they have the most work, so that short tiles end the launch.
struct Order {
  int units, tiles, groups;

  __host__ __device__ int pieces() const { return units * tiles; }
  __device__ int first_unit(int group) const { return int64_t(group) * units / groups; }
};

// A group has as many units as have keys and values of `l2_bytes`, or as have a tile for each multiprocessor if those are more;
// both are rounded down. Without `l2_bytes`, each unit is a group.
template <typename T>
Order make_order(const Attention<T>& p, int64_t l2_bytes = 0) {
  const int64_t whole = (int64_t(p.seq_q) + kBlockM - 1) / kBlockM;
  const int64_t tiles = p.packed ? whole + p.batch : whole, units = p.packed ? p.heads : int64_t(p.batch) * p.heads;
  STD_TORCH_CHECK(tiles * units < INT_MAX, "prefill_attention: more tiles of out than fit 32 bits");
  int64_t most = 1;
  if (l2_bytes > 0) {
    const int64_t bytes = int64_t(p.seq_kv) * (p.dim + p.v_dim) * sizeof(T) * p.kv_heads / p.heads;
    most = std::max({most, l2_bytes / std::max<int64_t>(bytes, 1), multiprocessors() / std::max<int64_t>(tiles, 1)});
  }
  const int64_t groups = (units + most - 1) / most;
  return {static_cast<int>(units), static_cast<int>(tiles), static_cast<int>(groups)};
}

// Piece `index` in this order.
template <int kBlockN, typename P>
__device__ Work work_of(const P& p, int index, const Order& order) {
  Work w{-1, 0, 0, {}, 0, 0};
  const int group = (int64_t(index / order.tiles + 1) * order.groups - 1) / order.units, first = order.first_unit(group);
  const int units = order.first_unit(group + 1) - first, within = index - first * order.tiles, unit = first + within % units;
  int rest = within / units;  // tiles of the unit that come before
  if (p.packed) {
    w.head = unit;
    for (int number = 0; number < p.batch && w.number < 0; ++number) {
      const Sequence s = p.sequence(number);
      const int tiles = (s.queries + kBlockM - 1) / kBlockM;
      if (rest < tiles) w.number = number, w.s = s, w.row0 = (tiles - 1 - rest) * kBlockM;
      rest -= tiles;
    }
    if (w.number < 0) return w;
  } else {
    w.number = unit / p.heads, w.head = unit % p.heads, w.s = p.sequence(w.number);
    w.row0 = (order.tiles - 1 - rest) * kBlockM;
  }
  if (w.row0 >= w.s.queries) return w;  // rows behind a sequence in a padded batch, which see nothing
  const int begin = p.span(w.s, w.row0).begin, end = p.span(w.s, min(w.row0 + kBlockM, w.s.queries) - 1).end;
  if (begin >= end) return w;
  w.first_block = begin / kBlockN;
  w.blocks = (end + kBlockN - 1) / kBlockN - w.first_block;
  return w;
}

// A block's shared memory and barriers. q, k, v and out are each in slabs of 64 columns, in the 128-byte swizzle. A warp has
// room for two slabs of its 16 rows of out, and for one where keys are longer than values. Heads of 96 fill half of their
// second slab: the copy engine writes zeros to the other half, which no product reads, and stores nothing of it. That costs as
// much shared memory as heads of 128, and no products. Slabs of 32 columns in the 64-byte swizzle would save a quarter of the
// memory, which no kernel here lacks.
template <typename T_, int kDim_, int kDimV_ = kDim_, int kTilesOfQ_ = 1, int kBlockN_ = kDimV_ <= 128 ? 128 : 64>
struct Tiles {
  using T = T_;
  static constexpr int kDim = kDim_, kDimV = kDimV_, kTilesOfQ = kTilesOfQ_;  // kDimV: of v and out
  static constexpr int kBlockN = kBlockN_, kStages = 2;
  static constexpr int kSlabs = (kDim + 63) / 64, kSlabsV = (kDimV + 63) / 64;
  static constexpr int kOutSlabs = kSlabsV < 2 || kSlabsV < kSlabs ? 1 : 2, kOutSlab = kRowsOfWarp * 64;
  static constexpr int kQ = kBlockM * kSlabs * 64, kK = kBlockN * kSlabs * 64, kV = kBlockN * kSlabsV * 64;  // elements
  static constexpr int kOut = kBlockM * kOutSlabs * 64;
  static constexpr int kBarriers = 2 * kTilesOfQ + 4 * kStages;
  static constexpr int kBytes = (kTilesOfQ * kQ + kStages * (kK + kV) + kOut) * sizeof(T) + kBarriers * sizeof(uint64_t);
  static_assert(kBytes <= 227 << 10, "more than a block has");

  T *q, *k, *v, *out;
  uint64_t *full_q, *empty_q, *full_k, *empty_k, *full_v, *empty_v;

  __device__ explicit Tiles(unsigned char* shared)
      : q(reinterpret_cast<T*>(shared)), k(q + kTilesOfQ * kQ), v(k + kStages * kK), out(v + kStages * kV),
        full_q(reinterpret_cast<uint64_t*>(out + kOut)), empty_q(full_q + kTilesOfQ), full_k(empty_q + kTilesOfQ),
        empty_k(full_k + kStages), full_v(empty_k + kStages), empty_v(full_v + kStages) {}

  // One thread.
  __device__ void init() const {
    for (int i = 0; i < kTilesOfQ; ++i) barrier_init(full_q + i, 1), barrier_init(empty_q + i, kConsumers * 4);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full_k + stage, 1), barrier_init(empty_k + stage, kConsumers * 4);
      barrier_init(full_v + stage, 1), barrier_init(empty_v + stage, kConsumers * 4);
    }
    barrier_init_fence();
  }

  // The box in shared memory where a warp puts 64 columns, slab number `slab`, of its rows of out.
  __device__ T* out_box(int warp, int slab) const { return out + (warp * kOutSlabs + slab % kOutSlabs) * kOutSlab; }

  template <int kRowsOfBox, int kCount = kSlabs>
  __device__ static void load(T* tile, const HeadsMap& map, uint64_t* full, int head, int token, int batch) {
    barrier_expect(full, kRowsOfBox * kCount * 64 * sizeof(T));
    copy<kRowsOfBox, kCount>(tile, map, full, head, token, batch);
  }
  template <int kRowsOfBox, int kCount = kSlabs>
  __device__ static void copy(T* tile, const HeadsMap& map, uint64_t* full, int head, int token, int batch) {
#pragma unroll
    for (int slab = 0; slab < kCount; ++slab)
      tma_load_heads(tile + slab * kRowsOfBox * 64, map, full, slab * 64, head, token, batch);
  }

  // The producer's part of one piece of work.
  __device__ void load(const Attention<T>& p, const AttentionMaps& maps, const Work& w, Ring<kStages>& ring,
                       uint32_t parity_of_q) const {
    if (w.blocks == 0) return;
    load_q(p, maps, w, 0, parity_of_q);
#pragma unroll 1
    for (int i = w.blocks - 1; i >= 0; --i, ring.advance()) {
      load_keys(p, maps, w, i, ring.stage, ring.parity);
      load_values(p, maps, w, i, ring.stage, ring.parity);
    }
  }

  __device__ void load_q(const Attention<T>& p, const AttentionMaps& maps, const Work& w, int stage, uint32_t parity) const {
    barrier_wait(empty_q + stage, parity ^ 1);
    load<kBlockM>(q + stage * kQ, maps.q, full_q + stage, w.head, w.s.first_q + w.row0, p.packed ? 0 : w.number);
  }

  // The keys, and the values, of a block.
  __device__ void load_keys(const Attention<T>& p, const AttentionMaps& maps, const Work& w, int block, int stage,
                            uint32_t parity) const {
    barrier_wait(empty_k + stage, parity ^ 1);
    load<kBlockN>(k + stage * kK, maps.k, full_k + stage, p.kv_head(w.head), w.token(block, kBlockN), p.packed ? 0 : w.number);
  }
  // The keys of a block in `stage` and the values of the block behind it in the other stage; both arrive at full_k.
  __device__ void load_keys_and_values(const Attention<T>& p, const AttentionMaps& maps, const Work& w, int block, int stage,
                                       uint32_t parity_of_k, uint32_t parity_of_v) const {
    const int head = p.kv_head(w.head), batch = p.packed ? 0 : w.number, token = w.token(block, kBlockN), other = 1 - stage;
    uint64_t* full = full_k + stage;
    barrier_wait(empty_k + stage, parity_of_k ^ 1);
    barrier_expect(full, (kK + kV) * sizeof(T));
    copy<kBlockN>(k + stage * kK, maps.k, full, head, token, batch);
    barrier_wait(empty_v + other, parity_of_v ^ 1);
    copy<kBlockN, kSlabsV>(v + other * kV, maps.v, full, head, token + kBlockN, batch);
  }
  __device__ void load_values(const Attention<T>& p, const AttentionMaps& maps, const Work& w, int block, int stage,
                              uint32_t parity) const {
    barrier_wait(empty_v + stage, parity ^ 1);
    load<kBlockN, kSlabsV>(v + stage * kV, maps.v, full_v + stage, p.kv_head(w.head), w.token(block, kBlockN),
                           p.packed ? 0 : w.number);
  }
};

// The registers of a consumer warpgroup: 64 rows of out, not yet divided by their sums.
template <typename Tile>
struct Rows64 {
  using T = typename Tile::T;
  static constexpr int kBlockN = Tile::kBlockN, kDim = Tile::kDim, kDimV = Tile::kDimV;
  using Scores = float[kBlockN / 2];
  using Exponentials = uint32_t[kBlockN / 16][4];  // rounded to T, as fragments of the second product

  const Tile& tiles;
  const Attention<T>& p;
  const int warpgroup = warpgroup_index();
  float factor;  // a score times this is an exponent of 2
  OnlineRows online;
  float out[kDimV / 2];

  __device__ Rows64(const Tile& tiles, const Attention<T>& p)
      : tiles(tiles), p(p), factor(p.softcap > 0.0f ? kLog2E : p.scale * kLog2E) {}

  __device__ void clear() {
    online = OnlineRows{};
#pragma unroll
    for (int i = 0; i < kDimV / 2; ++i) out[i] = 0.0f;
  }

  // One lane of each warp tells the producer.
  __device__ static void release(uint64_t* empty) {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
  }

  // Starts scores = q kᵀ with the keys of a stage.
  __device__ void start_scores(Scores& scores, int stage, int tile_of_q = 0) const {
    const T *q = tiles.q + tile_of_q * Tile::kQ + warpgroup * kRows * 64, *k = tiles.k + stage * Tile::kK;
    const uint64_t rows = tile_descriptor(q, 16, 1024), cols = tile_descriptor(k, 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {  // a step is 32 bytes of a row; descriptors count 16 bytes
      const int slab = step / 4, within = step % 4 * 2;
      wgmma<T, false>(scores, rows + slab * (kBlockM * 8) + within, cols + slab * (kBlockN * 8) + within, step > 0);
    }
    wgmma_commit();
  }

  // Starts out += exponentials v with the values of a stage, or out = exponentials v.
  __device__ void start_out(const Exponentials& exponentials, int stage, bool add = true) {
    const uint64_t values = tile_descriptor(tiles.v + stage * Tile::kV, kBlockN * 128, 1024);  //@ values_of_stage
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step)  // 16 rows of 128 bytes
      wgmma_registers_wide<T, true>(out, exponentials[step], values + step * 128, add || step > 0);
    wgmma_commit();
  }

  __device__ void cap(Scores& scores) const {
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) scores[i] = p.softcap * tanh_by_exp2(scores[i] * (p.scale / p.softcap));
  }

  // Hides those scores of the keys from key0 on that a row must not see.
  __device__ void hide(Scores& scores, const Work& w, int key0) const {
    const int lane = threadIdx.x % 32, row = w.row0 + threadIdx.x / 32 * kRowsOfWarp + lane / 4;
    const Span spans[2] = {p.span(w.s, row), p.span(w.s, row + 8)};
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      const int key = key0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
      const Span& span = spans[i / 2 % 2];
      if (key < span.begin || key >= span.end) scores[i] = -INFINITY;
    }
  }

  // The blocks, from `begin` to before `end`, of whose keys all rows see all.
  __device__ Span clear_blocks(const Work& w) const {
    const int first = w.row0 + warpgroup * kRows;
    const int begin = p.span(w.s, first + kRows - 1).begin, end = p.span(w.s, first).end;
    return {(begin + kBlockN - 1) / kBlockN - w.first_block, end / kBlockN - w.first_block};
  }

  // Both, where they are due.
  __device__ void mask(Scores& scores, const Work& w, int block) const {
    if (p.softcap > 0.0f) cap(scores);
    const Span clear = clear_blocks(w);
    if (block < clear.begin || block >= clear.end) hide(scores, w, (w.first_block + block) * kBlockN);
  }

  __device__ static void round(Exponentials& exponentials, const Scores& scores) {
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) to_fragment<T>(exponentials[step], scores, step);
  }

  // Overwrites values behind the sequence's last one with zeros: they may be NaN, and a power of 0 times NaN is NaN. Each
  // warpgroup writes all of them, so that neither waits for the other.
  __device__ bool has_tail(const Work& w, int block) const { return w.s.keys < (w.first_block + block + 1) * kBlockN; }
  __device__ void clear_tail(const Work& w, int block, int stage) const {
    const int left = w.s.keys - (w.first_block + block) * kBlockN;
    if (left >= kBlockN) return;
    T* values = tiles.v + stage * Tile::kV;
    const int pieces = (kBlockN - left) * 8;  // of 16 bytes; the swizzle exchanges them within a row
    for (int slab = 0; slab < Tile::kSlabsV; ++slab)
      for (int i = threadIdx.x % 128; i < pieces; i += 128)
        reinterpret_cast<uint4*>(values + slab * kBlockN * 64 + left * 64)[i] = uint4{};
    fence_async();
    named_barrier_sync(kTailBarrier + warpgroup, 128);
  }

  // Divides by the sums and writes the rows that exist; 0 for rows that saw no key. The copy engine reads shared memory until
  // the next call, or until `tma_store_wait<0>()`.
  __device__ void store(const AttentionMaps& maps, const Work& w) const {
    float inverse[2], lse[2];
    online.finish(factor, inverse, lse);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = w.row0 + warp * kRowsOfWarp;
    const int batch = p.packed ? 0 : w.number;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + lane / 4 + r * 8;
      if (row >= w.s.queries) inverse[r] = 0.0f, lse[r] = -INFINITY;  // what lies behind the queries may be NaN
      if (p.lse && lane % 4 == 0 && row < p.rows(w.s)) *p.lse_at(batch, w.s, row, w.head) = lse[r];
    }
    //@ whole_rows
    if (first + kRowsOfWarp <= p.rows(w.s)) store_boxes(inverse, maps, batch, w.s.first_q + first, w.head, warp, lane);
    else store_rows(inverse, w, batch, first, lane);
  }

  // Through shared memory and the copy engine, a slab at a time: threads alone would write 16 bytes of each row, half of what
  // L2 takes at once.
  __device__ void store_boxes(const float (&inverse)[2], const AttentionMaps& maps, int batch, int token, int head, int warp,
                              int lane) const {
#pragma unroll
    for (int slab = 0; slab < Tile::kSlabsV; ++slab) {
      T* box = tiles.out_box(warp, slab);
      if (lane == 0) tma_store_wait<Tile::kOutSlabs - 1>();  //@ slab_stored
      __syncwarp();
#pragma unroll
      for (int n = 0; n < 4 && slab * 4 + n < kDimV / 16; ++n) {  // 16 columns
        float values[8];
        uint32_t fragment[4];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = scaled(slab * 32 + n * 8 + i, inverse);
        to_fragment<T>(fragment, values, 0);
        stmatrix_x4(box + lane % 16 * 64 + ((n * 2 + lane / 16) ^ lane % 8) * 8, fragment);
      }
      fence_async();
      __syncwarp();
      if (lane == 0) {
        tma_store_heads(maps.out, box, slab * 64, head, token, batch);
        tma_store_commit();
      }
    }
  }

  // From registers: rows at the end of a sequence, where a box would overwrite the next sequence.
  __device__ void store_rows(const float (&inverse)[2], const Work& w, int batch, int first, int lane) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + lane / 4 + r * 8;
      if (row >= p.rows(w.s)) continue;
      T* to = p.out.at(batch, w.s.first_q + row, w.head) + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kDimV / 8; ++j)
        round_to(*reinterpret_cast<typename Vector<T>::Pair*>(to + j * 8), scaled(j * 4 + r * 2, inverse),
                 scaled(j * 4 + r * 2 + 1, inverse));
    }
  }

  __device__ float scaled(int i, const float (&inverse)[2]) const {
    return inverse[i / 2 % 2] > 0.0f ? out[i] * inverse[i / 2 % 2] : 0.0f;
  }
};

// For boxes of block_q queries, block_n keys and block_v values; block_v 0: block_n.
template <typename P>
AttentionMaps make_maps(const P& p, int block_n, int block_q = kBlockM, int block_v = 0) {
  require_vectors(p);
  AttentionMaps maps;
  const int batch = p.packed ? 1 : p.batch, box_v = block_v > 0 ? block_v : block_n;
  const auto make = [&](HeadsMap& map, const auto& of, int dim, int blocks, int tokens, int heads, int box) {
    return make_heads_map(map, of.begin, blocks, tokens, heads, dim, of.of_outer, of.of_inner, of.of_head, box);
  };
  // Without any keys there is no tensor map, and no block uses one.
  STD_TORCH_CHECK(make(maps.q, p.q, p.dim, batch, p.seq_q, p.heads, block_q) &&
                      make(maps.out, p.out, p.v_dim, batch, p.seq_q, p.heads, kRowsOfWarp) &&
                      (p.seq_kv == 0 || (make(maps.k, p.k, p.dim, p.blocks(), p.slots(), p.kv_heads, block_n) &&
                                         make(maps.v, p.v, p.v_dim, p.blocks(), p.slots(), p.kv_heads, box_v))),
                  "prefill_attention: the driver knows no tensor map for these tensors; it must be one of CUDA 12 or newer, "
                  "and strides under 2^39 elements");
  return maps;
}

// Calls launch.operator()<kDim, kDimV>() for the head_dim of q and k, and for that of v.
template <typename Launch>
void for_dims(int dim, int v_dim, Launch launch) {
  if (dim == 64) launch.template operator()<64, 64>();
  else if (dim == 96) launch.template operator()<96, 96>();
  else if (dim == 128) launch.template operator()<128, 128>();
  else if (dim == 192 && v_dim == 128) launch.template operator()<192, 128>();
  else if (dim == 192) launch.template operator()<192, 192>();
  else launch.template operator()<256, 256>();
}

}  // namespace minfer
