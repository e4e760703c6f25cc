// v12_pingpong: v11 as a persistent kernel, one block an SM, whose two consumers take turns; in clusters of two.
// Idea: each consumer multiplies a whole 128x128 tile; while it runs its epilogue, the other has the tensor cores. It hands
// over when it has started its last products, so that the other's follow without a gap. Sums leave through shared memory and
// the copy engine while the warp goes on with its next tile. Two blocks, one below the other, copy B once for both.
// Expected: 1.1x over v11 where k is small or the output fills few waves; less than v13 at large sizes, where 128x128 tiles
// read 20 % more shared-memory bytes a product and half again as much from the L2.
// Measured (H200, bfloat16, TN, float32, m=n=k=8192): 756.9 TFLOP/s cold, 642.3 steady; 96.7 % and 96.1 % of torch.
#include "cuda/gemm/warpgroup_tile.cuh"
#include "hgemm.h"

namespace minfer {

constexpr int kBlockM = 128, kBlockN = 128, kStages = 6;
constexpr int kCluster = 2;  // blocks, along M
constexpr int kBoxes = 2;    // that a warp stores from, so that one is filled while the other is read
constexpr int kGroup = 8;
constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * 128;  // the last warpgroup copies

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ Maps maps, Gemm<T> g) {
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
    Tile sums;
    const auto arrive = [](uint64_t* barrier) {
      if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    };
    const auto release = [&](int stage) {  // to the producers of all blocks
      if (threadIdx.x % 32 < kCluster) barrier_arrive_at(empty + stage, threadIdx.x % 32);
    };
    ring.skip(warpgroup * steps);
    uint32_t turn_parity = warpgroup ^ 1;  // the first turn of consumer 0 has come
    for (scheduler.advance(warpgroup); scheduler.goes_on(); scheduler.advance(kConsumers)) {
      // A parity tells a phase from the next only: without turns, a consumer would take a stage that is several behind.
      barrier_wait(turn + warpgroup, turn_parity);  //@ turn
      turn_parity ^= 1;
      int before = 0;  // the stage whose products may still be in flight
      for (int step = 0; step < steps; ++step, ring.advance()) {
        const T* stage = stages + ring.stage * Tiles::kElements;
        barrier_wait(full + ring.stage, ring.parity);
        sums.multiply(stage, stage + Tiles::kA, step == 0);
        if (step + 1 == steps) arrive(turn + (warpgroup ^ 1));  // its products follow these
        wgmma_wait<1>();
        if (step > 0) release(before);  //@ release
        before = ring.stage;
      }
      wgmma_finish(sums.sums);
      release(before);  //@ release_last
      ring.skip(steps);  // the other consumer's tile  //@ skip
      const int2 origin = scheduler.origin();
      sums.scale(g, origin.x, origin.y);
      sums.template store_boxes<kBoxes>(maps, boxes + warpgroup * 4 * kBoxes * Tile::kBox, origin.x, origin.y);
    }
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }
  cluster_sync_relaxed();  // no block ends while another arrives at its barriers
}

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  constexpr int kBytes = kStages * (Stage<T, kLayout, kBlockM, kBlockN>::kBytes + 2 * sizeof(uint64_t)) +
                         kConsumers * sizeof(uint64_t) +
                         kConsumers * 4 * kBoxes * WarpgroupTile<T, kLayout, kBlockM, kBlockN>::kBox * sizeof(T);
  static_assert(kBytes <= 227 << 10, "more than a block has");
  launch_persistent<kBlockM, kBlockN, kCluster>(multiply<T, kLayout>, kThreads, kBytes, g);
}

template <typename T>
void launch(const Gemm<T>& g) {
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v12_pingpong, minfer::launch)
