// The Hopper kernel of mla_decode: each launch divides the work equally among the blocks, or clusters of two, on the device.
// All of them run at once, so those with parts of one item divide its rows among them and add up the parts, when all are
// there.
#pragma once

#include "cuda/attention/schedule.cuh"
#include "cuda/counters.cuh"
#include "cuda/grid.cuh"
#include "cuda/shared_tile.cuh"
#include "hopper_latents.cuh"

namespace minfer {

using Units = Steps<kKeys, 2, 2>;  // a set-up of two steps and shares of at least two are guesses

// An item of which this block has written a part.
struct Shared {
  int number, row0, first, count;
  unsigned before;  // the item's counter, before this block arrived
};

// The workers of a launch, blocks or clusters, of which `at_once` run at once: a pure function. With a multiple of the items,
// sequences of one length are divided without a piece of a second item, whose parts would be written and added up, too; that
// may cost 1/16 of the workers.
inline int workers_for(int64_t items, int at_once) {
  const int64_t whole = items > 0 ? at_once / items * items : 0;
  return static_cast<int>(whole * 16 >= at_once * int64_t{15} ? whole : at_once);
}

// Where the part of an item is that this worker's number `part` of the item has left; a block of a cluster has slots of its
// own.
template <int kCluster>
__device__ int slot_of(int first, int part, int rank) {
  return (2 * (first + part) + (part == 0)) * kCluster + rank;
}

// The counter of the blocks that have parts of an item.
template <int kCluster>
__device__ unsigned* counter_of(unsigned* counters, int first, int rank) {
  return counters + first * kCluster + rank;
}

// Adds this block's share of an item's rows and writes it to out. A warp has a unit of 128 kVectors columns of a row, each lane
// kVectors times four of them. It loads kBatch parts at a time, the first before it knows the base, so that a unit of so many
// parts waits for memory once.
template <int kVectors, int kBatch, typename T, typename SlotOf>
__device__ void add_units(const Mla<T>& p, const Parts& parts, const Shared& item, int mine, SlotOf slot) {
  constexpr int kUnits = kLatent / (128 * kVectors);
  const int lane = threadIdx.x % 32, all = min(kRows, p.rows() - item.row0) * kUnits;
  const int end = static_cast<int>(int64_t(all) * (mine + 1) / item.count);
  for (int i = static_cast<int>(int64_t(all) * mine / item.count) + threadIdx.x / 32; i < end; i += kConsumerThreads / 32) {
    const int row = i / kUnits, column = i % kUnits * 128 + lane * 4;
    float4 more[kBatch][kVectors], sums[kVectors]{};
    float2 stats[kBatch];
    const auto load = [&](int first) {
#pragma unroll
      for (int part = 0; part < kBatch; ++part) {
        const bool there = first + part < item.count;
        const int at = slot(there ? first + part : 0);
        stats[part] = there ? __ldcg(&parts.stats_at(at, row)) : float2{-INFINITY, 0.0f};
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
          more[part][v] = there ? __ldcg(&parts.sums_at(at, row, column + v * 128)) : float4{};
      }
    };
    load(0);
    float highest = -INFINITY, total = 0.0f;
    for (int part = lane; part < item.count; part += 32) highest = fmaxf(highest, __ldcg(&parts.stats_at(slot(part), row)).x);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, bit));
    const float base = base_of_row(highest);
#pragma unroll 1
    for (int first = 0;;) {
#pragma unroll
      for (int part = 0; part < kBatch; ++part) {
        const float weight = exp2_approx(stats[part].x - base);
        total = fmaf(weight, stats[part].y, total);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const float4 each = more[part][v];
          sums[v].x = fmaf(weight, each.x, sums[v].x), sums[v].y = fmaf(weight, each.y, sums[v].y);
          sums[v].z = fmaf(weight, each.z, sums[v].z), sums[v].w = fmaf(weight, each.w, sums[v].w);
        }
      }
      first += kBatch;
      if (first >= item.count) break;
      load(first);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      store_out(p, item.number, 0, item.row0 + row, column + v * 128, Merged{sums[v], base, total}.divided(1.0f));
  }
}

// Waits for the other blocks of an item, then adds up a share of its rows. Both warpgroups call it.
template <int kCluster, typename T>
__device__ void add_up(const Mla<T>& p, const Parts& parts, const Shared& item, int worker, int rank, unsigned* arrived) {
  if (threadIdx.x == 0) team_wait(arrived, item.before);  //@ parts_there
  named_barrier_sync(kBoth, kConsumerThreads);
  const int mine = worker - item.first;
  const auto slot = [&](int part) { return slot_of<kCluster>(item.first, part, rank); };
  // With a row for each warp, few loads wait for others; with fewer rows, more warps have a unit.
  if (min(kRows, p.rows() - item.row0) >= kConsumerThreads / 32 * item.count) add_units<4, 4>(p, parts, item, mine, slot);
  else add_units<1, 16>(p, parts, item, mine, slot);
}

// `items_of_sequence`: tiles of query rows, or with clusters pairs of tiles, a tile for each block.
template <typename T, int kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ HeadsMap map, const __grid_constant__ Mla<T> p, Parts parts, int items_of_sequence,
           unsigned* counters) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ Share<Units> shares[2];  // the consumers' iterator and the producer's
  __shared__ Shared items[2];         // the item that this worker ends, and the one that it begins
  __shared__ bool more;
  const LatentTiles<T, kCluster> tiles(shared);
  const int worker = blockIdx.x / kCluster, rank = kCluster > 1 ? cluster_rank() : 0;
  if (threadIdx.x == kConsumerThreads) tma_prefetch(map);
  clear_empty<kThreads>(p);
  {
    const Share<Units> mine = share_of_block<Units, kThreads>(p, items_of_sequence, worker, gridDim.x / kCluster);
    if (threadIdx.x == 0) shares[0] = shares[1] = mine, tiles.init();
  }
  if constexpr (kCluster > 1) cluster_sync_relaxed();  // the barriers of both blocks are there
  __syncthreads();
  const auto piece_of = [&](const Share<Units>& s) {
    return Piece{s.number, (s.item % items_of_sequence * kCluster + rank) * kRows, s.keys, s.begin, s.stop};
  };
  if (warpgroup_index() == kConsumers) {
    registers_down<kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads)
      for (Ring<kStages> ring; shares[1].next(p);) tiles.load(p, map, piece_of(shares[1]), ring);
  } else {
    registers_up<kConsumerRegisters>();
    HalfRows<T, kCluster> rows(tiles, p);
    int waits = 0;
    while (true) {
      if (threadIdx.x == 0) more = shares[0].next(p);
      named_barrier_sync(kBoth, kConsumerThreads);
      if (!more) break;
      const Piece piece = piece_of(shares[0]);
      const int first = shares[0].first, count = shares[0].count;
      rows.attend(piece);
      if (count == 1) {
        rows.store(piece);
      } else {
        rows.leave(piece, parts, slot_of<kCluster>(first, worker - first, rank));
        named_barrier_sync(kBoth, kConsumerThreads);
        if (threadIdx.x == 0)
          items[waits] = {piece.number, piece.row0, first, count,
                          team_arrive(counter_of<kCluster>(counters, first, rank), count, worker == first)};
        ++waits;
      }
      named_barrier_sync(kBoth, kConsumerThreads);  // all have read the share
    }
    for (int i = 0; i < waits; ++i)
      add_up<kCluster>(p, parts, items[i], worker, rank, counter_of<kCluster>(counters, items[i].first, rank));
  }
  //@ cluster_end
  if constexpr (kCluster > 1) cluster_sync_relaxed();  // no block ends while the other one may still arrive at its barriers
}

// The tensor map of the cache, whose boxes have kKeys / kCluster rows. An empty cache has no tensor map, and no block uses
// it.
template <int kCluster, typename T>
HeadsMap make_map(const Mla<T>& p) {
  HeadsMap map;
  STD_TORCH_CHECK(p.blocks == 0 || p.slots == 0 ||
                      make_heads_map(map, p.cache.begin, p.blocks, p.slots, 1, kRow, p.cache.of_outer, p.cache.of_inner, 0,
                                     kKeys / kCluster),
                  "mla_decode: the driver knows no tensor map for cache; it must be one of CUDA 12 or newer, and strides under "
                  "2^39 elements");
  return map;
}

inline Parts parts_for(const Tensor& memory, int blocks) {
  return Parts::at(memory.mutable_data_ptr(), 2 * blocks, kRows, kLatent);
}
inline Tensor memory_for(int blocks) { return scratch_words(Parts::words(2 * blocks, kRows, kLatent)); }

// A kernel that may have the shared memory of its tiles.
template <typename T, int kCluster>
auto kernel_for() {
  constexpr int kBytes = LatentTiles<T, kCluster>::kBytes;
  static_assert(kBytes <= 225 << 10, "more than a block has besides its share");
  allow_shared(attend<T, kCluster>, kBytes);
  return attend<T, kCluster>;
}

template <typename T>
void launch_blocks(const Mla<T>& p) {
  const int items = (p.rows() + kRows - 1) / kRows;
  const int blocks = workers_for(int64_t(p.batch) * items, std::min(multiprocessors(), kMostCounters));
  const Tensor memory = memory_for(blocks);
  STD_CUDA_CHECK(launch_together(kernel_for<T, 1>(), dim3(blocks), kThreads, LatentTiles<T, 1>::kBytes, p.stream,
                                 make_map<1>(p), p, parts_for(memory, blocks), items, counters_of(p.stream)));
}

}  // namespace minfer
