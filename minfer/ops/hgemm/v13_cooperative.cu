// v13_cooperative: v11 with one block an SM that walks over tiles, clusters of two that share B, and TMA stores.
// Idea: two blocks of a cluster multiply tiles below each other, and each copies half of the columns of B for both: a
// third fewer bytes come from the L2. A finished tile is packed into 64 registers, where the next one's sums are not, and
// leaves from there a box at a time while the products of the next tile run: no product waits for a store.
// Expected: 1.1x over v11, most of it where the power limit decides: fewer bytes a product, and no product waits for a
// block to start or to store. At least 1.03x cuBLAS. Measured: see README.md.
#include "warpgroup_tile.cuh"

namespace minfer {

constexpr int kBlockM = 128, kBlockN = 256, kStages = 4;  // 192 KB
constexpr int kCluster = 2;                               // blocks, along M
constexpr int kGroup = 8;  // rows of clusters' tiles, 256 high: with 8 columns, 2048x2048 of the product run together
constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * 128, kRows = kBlockM / kConsumers;

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ Maps maps, Gemm<T> g) {
  using Tiles = Stage<T, kLayout, kBlockM, kBlockN>;
  using Tile = WarpgroupTile<T, kLayout, kRows, kBlockN>;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);
  T* boxes = stages + kStages * Tiles::kElements;
  uint64_t* full = reinterpret_cast<uint64_t*>(boxes + kConsumers * 4 * Tile::kBox);
  uint64_t* empty = full + kStages;  // of all blocks whose copies come here

  if (threadIdx.x == 0)
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(full + stage, 1), barrier_init(empty + stage, kCluster * kConsumers * 4);
  barrier_init_fence();
  cluster_sync_relaxed();

  const int steps = (g.k + kBlockK - 1) / kBlockK, warpgroup = warpgroup_index();
  Ring<kStages> ring;
  Walk<kBlockM, kBlockN, kCluster, kGroup> walk(g);
  if (warpgroup == kConsumers) {
    registers_down<40>();
    if (threadIdx.x == kConsumers * 128)
      for (; walk.goes_on(); walk.advance(1)) {
        const int2 origin = walk.origin();
        for (int step = 0; step < steps; ++step, ring.advance()) {
          barrier_wait(empty + ring.stage, ring.parity ^ 1);
          Tiles::template load_shared<kCluster>(stages + ring.stage * Tiles::kElements, maps, full + ring.stage, origin.x,
                                                origin.y, step * kBlockK, walk.rank);
        }
      }
  } else {
    registers_up<232>();
    Tile tile;
    Outgoing<Tile, T> outgoing;
    T* box = boxes + threadIdx.x / 32 * Tile::kBox;  // this warp's
    const auto release = [&](int stage) {  // to the producers of all blocks
      if (threadIdx.x % 32 < kCluster) barrier_arrive_at(empty + stage, threadIdx.x % 32);
    };
    for (; walk.goes_on(); walk.advance(1)) {
      int before = 0;
      for (int step = 0; step < steps; ++step, ring.advance()) {
        const T* stage = stages + ring.stage * Tiles::kElements;
        barrier_wait(full + ring.stage, ring.parity);
        tile.multiply(stage + warpgroup * kRows * kBlockK, stage + Tiles::kA, step == 0);
        while (!outgoing.rests()) {  // one box a step, and what is left of them in the last
          outgoing.store_next(maps, box);
          if (step + 1 < steps) break;
        }
        wgmma_wait<1>();
        if (step > 0) release(before);
        before = ring.stage;
      }
      wgmma_finish(tile.sums);
      release(before);
      const int2 origin = walk.origin();
      const int row0 = origin.x + warpgroup * kRows;
      tile.scale(g, row0, origin.y);
      outgoing.take(tile, row0, origin.y);
    }
    while (!outgoing.rests()) outgoing.store_next(maps, box);
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }
  cluster_sync_relaxed();  // no block ends while another arrives at its barriers
}

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  constexpr int kBytes = kStages * (Stage<T, kLayout, kBlockM, kBlockN>::kBytes + 2 * sizeof(uint64_t)) +
                         kConsumers * 4 * WarpgroupTile<T, kLayout, kRows, kBlockN>::kBox * sizeof(T);
  static_assert(kBytes <= 227 << 10, "more than a block has");
  launch_walk<kBlockM, kBlockN, kCluster>(multiply<T, kLayout>, kThreads, kBytes, g);
}

template <typename T>
void launch(const Gemm<T>& g) {
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v13_cooperative, minfer::launch)
