// v11_specialised: v10 with a producer warpgroup that only copies, two consumers that only multiply, and a 128x256 tile.
// Idea: the producer runs as far ahead as there are stages, and no consumer waits for the other: each stage has a barrier for
// "full" and one for "empty". The producer's registers go to the consumers (setmaxnreg), whose sums fill 128 of them; 64x256 a
// warpgroup reads the fewest shared-memory bytes a product that wgmma allows.
// Expected: 1.15x over v10: wgmma never waits for __syncthreads(), and 17 % fewer bytes of shared memory are read a
// product. Still lost: tensor cores idle during a block's prologue and epilogue.
// Measured (H200, bfloat16, TN, float32, m=n=k=8192): 751.4 TFLOP/s cold, 637.6 steady; 96.0 % and 95.4 % of torch.
#include "cuda/gemm/warpgroup_tile.cuh"
#include "hgemm.h"

namespace minfer {

constexpr int kBlockM = 128, kBlockN = 256, kStages = 4;
constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * 128;  // the last warpgroup copies
constexpr int kGroup = 16;

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ Maps maps, Gemm<T> g) {
  using Tiles = Stage<T, kLayout, kBlockM, kBlockN>;
  constexpr int kRows = kBlockM / kConsumers;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);
  uint64_t* full = reinterpret_cast<uint64_t*>(stages + kStages * Tiles::kElements);
  uint64_t* empty = full + kStages;
  const int2 place = grouped(kGroup, blockIdx.x, (g.m + kBlockM - 1) / kBlockM, (g.n + kBlockN - 1) / kBlockN);
  const int row0 = place.x * kBlockM, col0 = place.y * kBlockN, steps = (g.k + kBlockK - 1) / kBlockK;

  if (threadIdx.x == 0)
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(full + stage, 1), barrier_init(empty + stage, kConsumers * 4);  // the consumers' warps
  barrier_init_fence();
  __syncthreads();

  Ring<kStages> ring;
  const int warpgroup = warpgroup_index();
  if (warpgroup == kConsumers) {
    registers_down<40>();
    if (threadIdx.x == kConsumers * 128)
      for (int step = 0; step < steps; ++step, ring.advance()) {
        barrier_wait(empty + ring.stage, ring.parity ^ 1);  // in the first round all are
        Tiles::load(stages + ring.stage * Tiles::kElements, maps, full + ring.stage, row0, col0, step * kBlockK);
      }
  } else {
    registers_up<232>();
    WarpgroupTile<T, kLayout, kRows, kBlockN> tile;
    const auto release = [&](int stage) {
      if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage);
    };
    int before = 0;  // the stage whose products may still be in flight
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const T* stage = stages + ring.stage * Tiles::kElements;
      barrier_wait(full + ring.stage, ring.parity);
      tile.multiply(stage + warpgroup * kRows * kBlockK, stage + Tiles::kA, step == 0);
      wgmma_wait<1>();
      if (step > 0) release(before);  //@ release
      before = ring.stage;
    }
    wgmma_finish(tile.sums);
    tile.scale(g, row0 + warpgroup * kRows, col0);
    tile.store(g, row0 + warpgroup * kRows, col0);
  }
}

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  constexpr int kBytes = kStages * (Stage<T, kLayout, kBlockM, kBlockN>::kBytes + 2 * sizeof(uint64_t));
  const Maps maps = make_maps(g, kBlockM, kBlockN);
  const int64_t grid = int64_t(ceil_div(g.m, kBlockM)) * ceil_div(g.n, kBlockN);
  STD_TORCH_CHECK(grid <= INT_MAX, "hgemm: more output tiles than a launch has blocks");
  allow_shared(multiply<T, kLayout>, kBytes);
  multiply<T, kLayout><<<dim3(grid), kThreads, kBytes, g.stream>>>(maps, g);
}

template <typename T>
void launch(const Gemm<T>& g) {
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v11_specialised, minfer::launch)
