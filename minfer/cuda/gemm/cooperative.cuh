// The tiles of hgemm's v13, and of kernels like it. A block, one of a cluster of two, multiplies tiles of 128 x 256 of the
// product. One thread copies, two warpgroups multiply, and they store a finished tile while they multiply the next one.
#pragma once

#include <algorithm>

#include "cuda/elect.cuh"
#include "cuda/gemm/warpgroup_tile.cuh"

namespace minfer {

constexpr int kBlockM = 128, kBlockN = 256, kStages = 4;  // 192 KB
constexpr int kCluster = 2;                               // blocks, along M
constexpr int kGroup = 8;  // rows of clusters' tiles, 256 high: with 8 columns of them, 2048x2048 of the product run at once
constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * 128, kRows = kBlockM / kConsumers;

// `a_last` copies the last rows of A, and `b_last` the last columns of B in TN, in smaller boxes, because TMA takes longer for
// rows outside of the matrix than for those inside. m and n are the product's numbers of rows and columns.
struct CooperativeMaps : Maps {
  TensorMap a_last, b_last;
  int m, n;
};

// How many of a tile's `most` rows or columns are inside of the matrix if `left` of them remain, rounded up to a multiple of 8.
__host__ __device__ constexpr int inside(int left, int most) { return (std::max(0, std::min(left, most)) + 7) / 8 * 8; }

template <typename Problem>
CooperativeMaps make_cooperative_maps(const Problem& g) {
  constexpr int kPart = kBlockN / kCluster;  // columns that a block copies
  CooperativeMaps maps{make_maps(g, kBlockM, kPart)};
  maps.a_last = maps.a, maps.b_last = maps.b, maps.m = g.m, maps.n = g.n;
  const int rows = inside(g.m % kBlockM, kBlockM), cols = g.layout == Layout::TN ? inside(g.n % kPart, kPart) : 0;
  STD_TORCH_CHECK((rows % kBlockM == 0 || make_tensor_map(maps.a_last, g.a, g.m, g.k, g.lda, rows, kBlockK)) &&
                      (cols % kPart == 0 || make_tensor_map(maps.b_last, g.b, g.n, g.k, g.ldb, cols, kBlockK)),
                  "gemm: the driver knows no tensor map for the last rows and columns of these operands");
  return maps;
}

// The stages in shared memory, with the position of one thread that fills or reads them in turn. The product has type Out.
template <typename T, Layout kLayout, typename Out = T>
struct Stages {
  using Tiles = Stage<T, kLayout, kBlockM, kBlockN>;
  using Tile = WarpgroupTile<Out, kLayout, kRows, kBlockN, T>;
  static constexpr int kBytes =
      kStages * (Tiles::kBytes + 2 * sizeof(uint64_t)) + kConsumers * 4 * Tile::kBox * sizeof(Out);
  static_assert(kBytes <= 227 << 10, "more than a block has");

  T* stages;
  Out* boxes;  // one for each warp
  uint64_t *full, *empty;  // empty of all blocks whose copies come here
  Ring<kStages> ring;

  // All threads of the cluster call it.
  __device__ explicit Stages(unsigned char* shared)
      : stages(reinterpret_cast<T*>(shared)), boxes(reinterpret_cast<Out*>(stages + kStages * Tiles::kElements)),
        full(reinterpret_cast<uint64_t*>(boxes + kConsumers * 4 * Tile::kBox)), empty(full + kStages) {
    if (threadIdx.x == 0)
      for (int stage = 0; stage < kStages; ++stage)
        barrier_init(full + stage, 1), barrier_init(empty + stage, kCluster * kConsumers * 4);
    barrier_init_fence();
    cluster_sync_relaxed();
  }

  __device__ T* stage() const { return stages + ring.stage * Tiles::kElements; }

  // Waits until the next stage may be filled. Returns the barrier at which the copies to it arrive.
  __device__ uint64_t* wait_empty() const {
    barrier_wait(empty + ring.stage, ring.parity ^ 1);
    return full + ring.stage;
  }
  __device__ void wait_full() const { barrier_wait(full + ring.stage, ring.parity); }

  // Fills stages with the steps begin to end of a tile, in this order or backwards. Before each step, calls each(number).
  template <typename Each>
  __device__ void load(const CooperativeMaps& maps, int2 origin, int begin, int end, bool backwards, int rank, Each each) {
#pragma unroll 1  // a cold kernel waits for each of its instructions to come from memory
    for (int step = begin; step < end; ++step, ring.advance()) {
      each(step - begin);
      uint64_t* filled = wait_empty();
      const int k = (backwards ? begin + end - 1 - step : step) * kBlockK;
      load(maps, stage(), filled, origin, k, rank);
    }
  }

  // One thread starts a stage's copies: this block's rows of A, and its half of B's columns, which go to both blocks.
  __device__ static void load(const CooperativeMaps& maps, T* stage, uint64_t* filled, int2 origin, int k, int rank) {
    constexpr bool kTN = Tiles::kTN;
    constexpr int kPart = kBlockN / kCluster;
    const int rows = inside(maps.m - origin.x, kBlockM), cols = inside(maps.n - origin.y, kBlockN);
    const int from = rank * kPart, mine = cols - from, of_b = kTN ? cols : (cols + 63) / 64 * 64;
    T* b = stage + Tiles::kA + from * kBlockK;
    barrier_expect(filled, (rows + of_b) * kBlockK * sizeof(T));
    if (rows > 0) tma_load(stage, rows == kBlockM ? maps.a : maps.a_last, filled, k, origin.x);  //@ rows_inside
    const TensorMap& map = !kTN || mine >= kPart ? maps.b : maps.b_last;  //@ columns_inside
    const auto copy = [&](T* box, int x, int y) { tma_load_multicast(box, map, filled, x, y, (1 << kCluster) - 1); };
    if constexpr (kTN) {
      if (mine > 0) copy(b, k, origin.y + from);
    } else {
#pragma unroll
      for (int slab = 0; slab < kPart / 64; ++slab)
        if (slab * 64 < mine) copy(b + slab * kSlab, origin.y + from + slab * 64, k);
    }
  }

  // Gives a stage that this warp has read to the producers of all blocks.
  __device__ void release(int stage) {
    if (threadIdx.x % 32 < kCluster) barrier_arrive_at(empty + stage, threadIdx.x % 32);  //@ blocks_of_cluster
  }
};

// The sums of one consumer warpgroup, and the store of its previous tile: of the sums, or of a Result made of them.
template <typename T, Layout kLayout, typename Out = T, typename Result = typename Stages<T, kLayout, Out>::Tile>
struct Sums {
  using Tile = typename Stages<T, kLayout, Out>::Tile;

  const int row = warpgroup_index() * kRows;  // the first, of the block's
  Tile tile;
  Outgoing<Result, Out> outgoing;

  // Accumulates the steps begin to end of a tile, and runs under(step) while the products of each step run.
  template <typename Under>
  __device__ void multiply(Stages<T, kLayout, Out>& from, const Maps& maps, int begin, int end, Under under) {
    using Tiles = typename Stages<T, kLayout, Out>::Tiles;
    const auto start = [&](int stage, int step) {
      const T* a = from.stages + stage * Tiles::kElements;
      tile.multiply(a + row * kBlockK, a + Tiles::kA, step == begin);
    };
    const auto beside = [&](int step) { under(step), outgoing.store_beside(step, end, maps, box(from)); };
    const auto release = [&](int stage) { from.release(stage); };
    const int last = multiply_steps(from.ring, from.full, begin, end, start, beside, release);
    wgmma_finish(tile.sums);
    from.release(last);
  }
  __device__ void multiply(Stages<T, kLayout, Out>& from, const Maps& maps, int begin, int end) {
    multiply(from, maps, begin, end, [](int) {});
  }

  // Starts the store of the finished tile.
  __device__ void take(const Gemm<T>& g, int2 origin) {
    tile.scale(g, origin.x + row, origin.y);
    outgoing.take(tile, origin.x + row, origin.y);
  }

  // Stores what is left of the last one.
  __device__ void finish(const Stages<T, kLayout, Out>& from, const Maps& maps) {
    while (!outgoing.rests()) outgoing.store_next(maps, box(from));
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }

  __device__ static Out* box(const Stages<T, kLayout, Out>& from) { return from.boxes + threadIdx.x / 32 * Tile::kBox; }
};

}  // namespace minfer
