// What v13 and v14_stream_k share: a block of a cluster of two that multiplies 128 x 256 of the product, one thread of it
// copying, two warpgroups multiplying, and a finished tile being stored while the next one is multiplied.
#pragma once

#include "warpgroup_tile.cuh"

namespace minfer {

constexpr int kBlockM = 128, kBlockN = 256, kStages = 4;  // 192 KB
constexpr int kCluster = 2;                               // blocks, along M
constexpr int kGroup = 8;  // rows of clusters' tiles, 256 high: with 8 columns, 2048x2048 of the product run together
constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * 128, kRows = kBlockM / kConsumers;

// The stages in shared memory, as one thread sees them that fills or reads all of them in turn.
template <typename T, Layout kLayout>
struct Stages {
  using Tiles = Stage<T, kLayout, kBlockM, kBlockN>;
  using Tile = WarpgroupTile<T, kLayout, kRows, kBlockN>;
  static constexpr int kBytes =
      kStages * (Tiles::kBytes + 2 * sizeof(uint64_t)) + kConsumers * 4 * Tile::kBox * sizeof(T);
  static_assert(kBytes <= 227 << 10, "more than a block has");

  T *stages, *boxes;  // boxes: one for each warp
  uint64_t *full, *empty;  // empty of all blocks whose copies come here
  Ring<kStages> ring;

  // All threads of the cluster call it.
  __device__ explicit Stages(unsigned char* shared)
      : stages(reinterpret_cast<T*>(shared)), boxes(stages + kStages * Tiles::kElements),
        full(reinterpret_cast<uint64_t*>(boxes + kConsumers * 4 * Tile::kBox)), empty(full + kStages) {
    if (threadIdx.x == 0)
      for (int stage = 0; stage < kStages; ++stage)
        barrier_init(full + stage, 1), barrier_init(empty + stage, kCluster * kConsumers * 4);
    barrier_init_fence();
    cluster_sync_relaxed();
  }

  __device__ T* stage() const { return stages + ring.stage * Tiles::kElements; }

  // Waits until the next stage may be filled, and is where the copies to it arrive.
  __device__ uint64_t* wait_empty() const {
    barrier_wait(empty + ring.stage, ring.parity ^ 1);
    return full + ring.stage;
  }
  __device__ void wait_full() const { barrier_wait(full + ring.stage, ring.parity); }

  // Fills stages with the steps begin to end of a tile, in this order or backwards, and calls each(step) before each.
  template <typename Each>
  __device__ void load(const Maps& maps, int2 origin, int begin, int end, bool backwards, int rank, Each each) {
#pragma unroll 1  // a cold kernel waits for each of its instructions to come from memory
    for (int step = begin; step < end; ++step, ring.advance()) {
      each(step - begin);
      uint64_t* filled = wait_empty();
      const int k = (backwards ? begin + end - 1 - step : step) * kBlockK;
      Tiles::template load_shared<kCluster>(stage(), maps, filled, origin.x, origin.y, k, rank);
    }
  }

  // Gives a stage that this warp has read to the producers of all blocks.
  __device__ void release(int stage) {
    if (threadIdx.x % 32 < kCluster) barrier_arrive_at(empty + stage, threadIdx.x % 32);
  }
};

// The sums of one consumer warpgroup, and the store of the tile before.
template <typename T, Layout kLayout>
struct Sums {
  using Tile = typename Stages<T, kLayout>::Tile;

  const int row = warpgroup_index() * kRows;  // the first, of the block's
  Tile tile;
  Outgoing<Tile, T> outgoing;

  // Adds up the steps begin to end of a tile.
  __device__ void multiply(Stages<T, kLayout>& from, const Maps& maps, int begin, int end) {
    int before = 0;
    for (int step = begin; step < end; ++step, from.ring.advance()) {
      from.wait_full();
      tile.multiply(from.stage() + row * kBlockK, from.stage() + Stages<T, kLayout>::Tiles::kA, step == begin);
      while (!outgoing.rests()) {  // one box a step, and what is left of them in the last
        outgoing.store_next(maps, box(from));
        if (step + 1 < end) break;
      }
      wgmma_wait<1>();
      if (step > begin) from.release(before);
      before = from.ring.stage;
    }
    wgmma_finish(tile.sums);
    from.release(before);
  }

  // Starts the store of the finished tile.
  __device__ void take(const Gemm<T>& g, int2 origin) {
    tile.scale(g, origin.x + row, origin.y);
    outgoing.take(tile, origin.x + row, origin.y);
  }

  // Stores what is left of the last one.
  __device__ void finish(const Stages<T, kLayout>& from, const Maps& maps) {
    while (!outgoing.rests()) outgoing.store_next(maps, box(from));
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }

  __device__ static T* box(const Stages<T, kLayout>& from) { return from.boxes + threadIdx.x / 32 * Tile::kBox; }
};

}  // namespace minfer
