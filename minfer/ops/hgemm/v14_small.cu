// v14_small: tiles of 64x64 or 64x128, as many as there are multiprocessors or more, in clusters of two that share B.
// Idea: a small product has too few tiles of v13's to go round, and small tiles read more of the L2 a product; what two
// tiles below each other share is copied once. A block's first copies start before its first barrier: of 10 us, every
// one that goes by before memory is asked counts.
// Expected: 1.3x over v12 at 1024 and less; slower from 2048 on, where the L2 is what limits. Measured: see README.md.
#include "warpgroup_tile.cuh"

namespace minfer {

constexpr int kBlockM = 64, kStages = 8;
constexpr int kCluster = 2;         // blocks, along M
constexpr int kThreads = 128 + 32;  // a consumer warpgroup, and a warp that copies
constexpr int kGroup = 8;

template <typename T, Layout kLayout, int kBlockN>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ Maps maps, Gemm<T> g) {
  using Tiles = Stage<T, kLayout, kBlockM, kBlockN>;
  using Tile = WarpgroupTile<T, kLayout, kBlockM, kBlockN>;
  constexpr int kBoxes = kBlockN / 64;  // that a warp stores from: all that it has
  extern __shared__ __align__(1024) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);
  T* boxes = stages + kStages * Tiles::kElements;
  uint64_t* full = reinterpret_cast<uint64_t*>(boxes + 4 * kBoxes * Tile::kBox);
  uint64_t* empty = full + kStages;
  const int2 origin = Walk<kBlockM, kBlockN, kCluster, kGroup>(g).origin();
  const int steps = (g.k + kBlockK - 1) / kBlockK, rank = cluster_rank();

  const auto stage_of = [&](int stage) { return stages + stage * Tiles::kElements; };
  const int ahead = min(kStages, steps);  // copies of A that start before the other block's barriers are there
  if (threadIdx.x == 128) {
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(full + stage, 1), barrier_init(empty + stage, kCluster * 4);
    barrier_init_fence();
    for (int step = 0; step < ahead; ++step)
      Tiles::load_a(stage_of(step), maps, full + step, origin.x, step * kBlockK);
    tma_prefetch(maps.b), tma_prefetch(maps.c);
  }
  cluster_sync_relaxed();

  Ring<kStages> ring;
  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128)
      for (int step = 0; step < steps; ++step, ring.advance()) {
        if (step >= ahead) {
          barrier_wait(empty + ring.stage, ring.parity ^ 1);
          Tiles::load_a(stage_of(ring.stage), maps, full + ring.stage, origin.x, step * kBlockK);
        }
        Tiles::template load_b<kCluster>(stage_of(ring.stage), maps, full + ring.stage, origin.y, step * kBlockK, rank);
      }
  } else {
    Tile tile;
    const auto release = [&](int stage) {  // to the producers of both blocks
      if (threadIdx.x % 32 < kCluster) barrier_arrive_at(empty + stage, threadIdx.x % 32);
    };
    int before = 0;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const T* stage = stage_of(ring.stage);
      barrier_wait(full + ring.stage, ring.parity);
      tile.multiply(stage, stage + Tiles::kA, step == 0);
      wgmma_wait<1>();
      if (step > 0) release(before);
      before = ring.stage;
    }
    wgmma_finish(tile.sums);
    tile.scale(g, origin.x, origin.y);
    tile.template store_boxes<kBoxes>(maps, boxes, origin.x, origin.y);
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }
  cluster_sync_relaxed();  // no block ends while another arrives at its barriers
}

template <Layout kLayout, int kBlockN, typename T>
void launch_tiles(const Gemm<T>& g) {
  constexpr int kBytes = kStages * (Stage<T, kLayout, kBlockM, kBlockN>::kBytes + 2 * sizeof(uint64_t)) +
                         kBlockN / 64 * 4 * WarpgroupTile<T, kLayout, kBlockM, kBlockN>::kBox * sizeof(T);
  static_assert(kBytes <= 227 << 10, "more than a block has");
  const int64_t clusters = int64_t(ceil_div(g.m, kBlockM * kCluster)) * ceil_div(g.n, kBlockN);
  STD_TORCH_CHECK(clusters <= INT_MAX / kCluster, "hgemm: more output tiles than a launch has blocks");
  allow_shared(multiply<T, kLayout, kBlockN>, kBytes);
  STD_CUDA_CHECK(launch_clusters(multiply<T, kLayout, kBlockN>, kCluster, int(clusters) * kCluster, kThreads, kBytes,
                                 g.stream, make_maps(g, kBlockM, kBlockN / kCluster), g));
}

// Half as wide tiles where wide ones would leave every other multiprocessor without any.
template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  const int64_t wide = int64_t(ceil_div(g.m, kBlockM)) * ceil_div(g.n, 128);
  2 * wide <= multiprocessors() ? launch_tiles<kLayout, 64>(g) : launch_tiles<kLayout, 128>(g);
}

template <typename T>
void launch(const Gemm<T>& g) {
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v14_small, minfer::launch)
