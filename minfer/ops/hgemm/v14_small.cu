// v14_small: tiles of 64 rows and 64 to 128 columns, or of 32 rows, in clusters of two that share B.
// Idea: a small product has too few of v13's tiles to go round, and small tiles read more of the L2 a product; what two
// tiles below each other share is copied once. Memory's speed is bytes under way over latency, so that stages fill shared
// memory, and the tile leaves through them. Up to 64 rows are two tiles of 32, with B^T as the first operand.
// Expected: 1.3x over v12 at 1024 and less; slower from 2048 on, where the L2 is what limits. Measured: see README.md.
#include "warpgroup_tile.cuh"

namespace minfer {

constexpr int kCluster = 2;         // blocks, along M
constexpr int kThreads = 128 + 32;  // a consumer warpgroup, and a warp that copies

template <typename T_, Layout kLayout, int kM_, int kN_>
struct Shape {
  using T = T_;
  static constexpr int kM = kM_, kN = kN_;
  using Tiles = Stage<T, kLayout, kM, kN>;
  using Tile = std::conditional_t<kM == 32, SwappedTile<T, kLayout, kM, kN>, WarpgroupTile<T, kLayout, kM, kN>>;
  static constexpr int kStages = (227 << 10) / (Tiles::kBytes + 2 * sizeof(uint64_t));
  static constexpr int kBytes = kStages * (Tiles::kBytes + 2 * sizeof(uint64_t));
};

template <typename Shape>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ Maps maps, Gemm<typename Shape::T> g) {
  using T = typename Shape::T;
  using Tiles = typename Shape::Tiles;
  constexpr int kStages = Shape::kStages;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);
  uint64_t* full = reinterpret_cast<uint64_t*>(stages + kStages * Tiles::kElements);
  uint64_t* empty = full + kStages;
  const int row0 = blockIdx.x * Shape::kM, col0 = blockIdx.y * Shape::kN, rank = blockIdx.x % kCluster;
  const int steps = (g.k + kBlockK - 1) / kBlockK;

  if (threadIdx.x == 0) tma_prefetch(maps.a), tma_prefetch(maps.b), tma_prefetch(maps.c);
  if (threadIdx.x == 128) {
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(full + stage, 1), barrier_init(empty + stage, kCluster * 4);
    barrier_init_fence();
  }
  cluster_sync_relaxed();

  Ring<kStages> ring;
  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128)
#pragma unroll 1  // a cold kernel waits for each of its instructions to come from memory
      for (int step = 0; step < steps; ++step, ring.advance()) {
        barrier_wait(empty + ring.stage, ring.parity ^ 1);
        Tiles::template load_shared<kCluster>(stages + ring.stage * Tiles::kElements, maps, full + ring.stage, row0, col0,
                                              step * kBlockK, rank);
      }
  } else {
    typename Shape::Tile tile;
    const auto release = [&](int stage) {  // to the producers of both blocks
      if (threadIdx.x % 32 < kCluster) barrier_arrive_at(empty + stage, threadIdx.x % 32);
    };
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const T* stage = stages + ring.stage * Tiles::kElements;
      barrier_wait(full + ring.stage, ring.parity);
      tile.multiply(stage, stage + Tiles::kA, step == 0);
      wgmma_wait<1>();
      if (step > 0) release(before);
      before = ring.stage;
    }
    wgmma_finish(tile.sums);
    tile.scale(g, row0, col0);
    warps_sync();  // all stages are read, and nothing more is on its way to them
    if constexpr (Shape::kM == 32) {
      tile.store_boxes(maps, stages, row0, col0);
    } else if constexpr (Shape::kN % 64 == 0) {
      tile.template store_boxes<Shape::kN / 64>(maps, stages, row0, col0);
      if (threadIdx.x % 32 == 0) tma_store_wait<0>();
    } else {
      tile.store(g, row0, col0);
    }
  }
  cluster_sync_relaxed();  // no block ends while another arrives at its barriers
}

template <typename Shape, typename T>
void launch_shape(const Gemm<T>& g) {
  const int down = ceil_div(g.m, Shape::kM * kCluster) * kCluster, across = ceil_div(g.n, Shape::kN);
  STD_TORCH_CHECK(across <= 65535, "hgemm: this kernel takes n up to ", 65535 * Shape::kN, ", got ", g.n);
  allow_shared(multiply<Shape>, Shape::kBytes);
  STD_CUDA_CHECK(launch_clusters(multiply<Shape>, kCluster, dim3(down, across), kThreads, Shape::kBytes, g.stream,
                                 make_maps(g, Shape::kM, Shape::kN / kCluster), g));
}

// The narrowest tiles that all run at once, or wide ones, which read less of the L2.
template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  const int rows = g.m <= 64 ? 32 : 64;
  const auto fits = [&](int width) {
    return int64_t(ceil_div(g.m, rows)) * ceil_div(g.n, width) <= multiprocessors();
  };
  if (g.m <= 64)
    return fits(64) ? launch_shape<Shape<T, kLayout, 32, 64>>(g) : launch_shape<Shape<T, kLayout, 32, 128>>(g);
  if (fits(64)) return launch_shape<Shape<T, kLayout, 64, 64>>(g);
  if constexpr (kLayout == Layout::TN)  // in NN a copy brings 64 columns
    if (fits(96)) return launch_shape<Shape<T, kLayout, 64, 96>>(g);
  launch_shape<Shape<T, kLayout, 64, 128>>(g);
}

template <typename T>
void launch(const Gemm<T>& g) {
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v14_small, minfer::launch)
