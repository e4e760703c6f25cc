// v03_pingpong: hgemm's v12 with bias and GELU on a finished tile's sums.
// Idea: GELU by CUDA's erff takes 30 instructions a sum, 5,000 issue slots of a multiprocessor for a tile of 128 x 256: 8 % of
// the products' time at k = 4096. In hgemm's v13 the tensor cores would idle meanwhile. Here two warpgroups take turns, each
// with a tile of 128 x 128, and one's epilogue runs under the other's products.
// Expected: hgemm's v12, 750 TFLOP/s on an H200 at 8192, with erf as with tanh; torch's product alone has 780, and its GELU
// is a kernel of its own.
// Measured (H200, float16, TN, m=n=k=8192): 711.2 TFLOP/s cold; 97.0 % of torch.
#include "gemm_bias_gelu.h"
#include "cuda/gemm/biases.cuh"

namespace minfer {

constexpr int kBlockM = 128, kBlockN = 128, kStages = 6;
constexpr int kCluster = 2;  // blocks, along M
constexpr int kBoxes = 2;    // that a warp stores from, so that one is filled while the other is read
constexpr int kGroup = 8;
constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * 128;  // the last warpgroup copies

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ Maps maps, Biased<T> g, Gelu gelu) {
  using Tiles = Stage<T, kLayout, kBlockM, kBlockN>;
  using Tile = WarpgroupTile<T, kLayout, kBlockM, kBlockN>;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);
  T* boxes = stages + kStages * Tiles::kElements;
  uint64_t* full = reinterpret_cast<uint64_t*>(boxes + kConsumers * 4 * kBoxes * Tile::kBox);
  uint64_t *empty = full + kStages, *turn = empty + kStages;  // a turn for each consumer

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(full + stage, 1), barrier_init(empty + stage, kCluster * 4);
    for (int consumer = 0; consumer < kConsumers; ++consumer) barrier_init(turn + consumer, 4);
  }
  barrier_init_fence();
  cluster_sync_relaxed();

  const int steps = (g.k + kBlockK - 1) / kBlockK, warpgroup = warpgroup_index();
  WorkTileScheduler<kBlockM, kBlockN, kCluster, kGroup> scheduler(g);
  Ring<kStages> ring;
  if (warpgroup == kConsumers) {
    registers_down<40>();
    if (threadIdx.x == kConsumers * 128)
      for (; scheduler.goes_on(); scheduler.advance(1)) {
        const int2 origin = scheduler.origin();
        for (int step = 0; step < steps; ++step, ring.advance()) {
          barrier_wait(empty + ring.stage, ring.parity ^ 1);
          Tiles::template load_shared<kCluster>(stages + ring.stage * Tiles::kElements, maps, full + ring.stage, origin.x,
                                                origin.y, step * kBlockK, scheduler.rank);
        }
      }
  } else {
    registers_up<232>();
    Tile tile;
    const auto start = [&](int stage, int step) {
      const T* a = stages + stage * Tiles::kElements;
      tile.multiply(a, a + Tiles::kA, step == 0);
      if (step + 1 == steps && threadIdx.x % 32 == 0) barrier_arrive(turn + (warpgroup ^ 1));  // its products follow
    };
    const auto release = [&](int stage) {  // to the producers of all blocks
      if (threadIdx.x % 32 < kCluster) barrier_arrive_at(empty + stage, threadIdx.x % 32);
    };
    ring.skip(warpgroup * steps);
    uint32_t turn_parity = warpgroup ^ 1;  // the first turn of consumer 0 has come
    for (scheduler.advance(warpgroup); scheduler.goes_on(); scheduler.advance(kConsumers), turn_parity ^= 1) {
      const int2 origin = scheduler.origin();
      const Biases<T, kBlockN> biases(g, origin.y);  //@ bias_of_tile
      barrier_wait(turn + warpgroup, turn_parity);  //@ turn
      const int last = multiply_steps(ring, full, 0, steps, start, [](int) {}, release);
      wgmma_finish(tile.sums);
      release(last);
      ring.skip(steps);  // the other consumer's tile
#pragma unroll
      for (auto& rows : tile.sums) biases.template apply<true>(rows, gelu);
      tile.template store_boxes<kBoxes>(maps, boxes + warpgroup * 4 * kBoxes * Tile::kBox, origin.x, origin.y);
    }
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }
  cluster_sync_relaxed();  // no block ends while another arrives at its barriers
}

template <Layout kLayout, typename T>
void launch_layout(const Biased<T>& g, Gelu gelu) {
  using Tile = WarpgroupTile<T, kLayout, kBlockM, kBlockN>;
  constexpr int kBytes = kStages * (Stage<T, kLayout, kBlockM, kBlockN>::kBytes + 2 * sizeof(uint64_t)) +
                         kConsumers * sizeof(uint64_t) + kConsumers * 4 * kBoxes * Tile::kBox * sizeof(T);
  static_assert(kBytes <= 227 << 10, "more than a block has");
  const Maps maps = make_maps(g, kBlockM, kBlockN / kCluster);
  const int clusters = persistent_grid<kBlockM, kBlockN, kCluster>(multiply<T, kLayout>, kThreads, kBytes, g).clusters;
  STD_CUDA_CHECK(launch_clusters(multiply<T, kLayout>, kCluster, clusters * kCluster, kThreads, kBytes, g.stream, maps, g,
                                 gelu));
}

template <typename T>
void launch(const Biased<T>& g, Gelu gelu) {
  require_rows(g);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g, gelu) : launch_layout<Layout::NN>(g, gelu);
}

}  // namespace minfer

MINFER_GEMM_BIAS_GELU(gemm_bias_gelu_v03_pingpong, minfer::launch)
