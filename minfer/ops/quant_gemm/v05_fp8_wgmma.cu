// v05_fp8_wgmma: hgemm's v13 with e4m3: TMA, wgmma m64n256k32, clusters of two that share W, a persistent kernel.
// Idea: the swizzle orders 128 bytes of a row, 64 numbers of a half type or 128 of fp8, and a step of wgmma is 32 bytes of
// either. So pairs of fp8, as elements of 16 bits, use v13's boxes, stages and descriptors, with twice the numbers in each.
// Scales of rows and columns multiply the sums of a finished tile before they are packed for the store.
// Expected: as near to fp8's rate as v13 to bfloat16's: 1.9 times its 800 TFLOP/s at 8192, less the time to load scales, in
// which no product runs: 1466 TFLOP/s or more. Sums are as the tensor cores keep them (accumulate=fast): adding them up in fp32
// would take another 128 registers a thread.
// Measured (H200, bfloat16, fp8_fp8, fast, m=n=k=8192): 1523 TFLOP/s cold.
#include "cuda/gemm/cooperative.cuh"
#include "fp8_wgmma.cuh"

namespace minfer {

template <typename Out>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ CooperativeMaps maps, Scaled<Out> g) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Stages<E4M3Pair, Layout::TN, Out> stages(shared);
  const int steps = (g.k + kBlockK - 1) / kBlockK;
  WorkTileScheduler<kBlockM, kBlockN, kCluster, kGroup> scheduler(g);
  if (warpgroup_index() == kConsumers) {
    registers_down<40>();
    if (elected(kConsumers * 4))
      for (bool back = false; scheduler.goes_on(); scheduler.advance(1), back = !back)
        stages.load(maps, scheduler.origin(), 0, steps, back, scheduler.rank, [](int) {});
  } else {
    registers_up<232>();
    Sums<E4M3Pair, Layout::TN, Out> sums;
    for (; scheduler.goes_on(); scheduler.advance(1)) {
      const int2 origin = scheduler.origin();
      sums.multiply(stages, maps, 0, steps);
      scale_tile<kBlockN>(sums.tile.sums[0], g, origin.x + sums.row, [&](int j) {
        const int col = origin.y + j * 8 + threadIdx.x % 4 * 2;
        return col < g.n ? *reinterpret_cast<const float2*>(g.w_scales + col) : float2{};
      });
      sums.outgoing.take(sums.tile, origin.x + sums.row, origin.y);
    }
    sums.finish(stages, maps);
  }
  cluster_sync_relaxed();  // no block exits while another may still signal its barriers
}

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  const Scaled<T> g = make_scaled(p);
  constexpr int kBytes = Stages<E4M3Pair, Layout::TN, T>::kBytes;
  const CooperativeMaps maps = make_cooperative_maps(g);
  const int clusters = persistent_grid<kBlockM, kBlockN, kCluster>(multiply<T>, kThreads, kBytes, g).clusters;
  STD_CUDA_CHECK(launch_clusters(multiply<T>, kCluster, clusters * kCluster, kThreads, kBytes, g.stream, maps, g));
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v05_fp8_wgmma, false, true, minfer::launch)
