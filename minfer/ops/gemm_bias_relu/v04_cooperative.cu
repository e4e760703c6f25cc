// v04_cooperative: hgemm's v13 with bias and ReLU on a finished tile's sums, before they are packed to leave.
// Idea: for products of many tiles all that matters is the mainloop, and v13's stays as it is: a tile's epilogue is one load
// of 32 bias pairs a thread, which the L2 has, and two operations a sum.
// Expected: hgemm's v13 less 1 % at 4096, 740 TFLOP/s on an H200; where there are fewer tiles than multiprocessors, v03 is
// faster.
// Measured (H200, float16, TN, m=n=k=8192): 738.2 TFLOP/s cold, 614.3 steady; 101.4 % and 99.9 % of torch.
#include "gemm_bias_relu.h"
#include "cuda/gemm/biases.cuh"
#include "cuda/gemm/cooperative.cuh"

namespace minfer {

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ CooperativeMaps maps, Biased<T> g) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Stages<T, kLayout> stages(shared);
  const int steps = (g.k + kBlockK - 1) / kBlockK;
  WorkTileScheduler<kBlockM, kBlockN, kCluster, kGroup> scheduler(g);
  if (warpgroup_index() == kConsumers) {
    registers_down<40>();
    if (elected(kConsumers * 4))
      for (bool back = false; scheduler.goes_on(); scheduler.advance(1), back = !back)
        stages.load(maps, scheduler.origin(), 0, steps, back, scheduler.rank, [](int) {});
  } else {
    registers_up<232>();
    Sums<T, kLayout> sums;
    for (; scheduler.goes_on(); scheduler.advance(1)) {
      const int2 origin = scheduler.origin();
      sums.multiply(stages, maps, 0, steps);
      Biases<T, kBlockN>(g, origin.y).apply(sums.tile.sums[0], Relu{});
      sums.take(g, origin);
    }
    sums.finish(stages, maps);
  }
  cluster_sync_relaxed();  // no block ends while another arrives at its barriers
}

template <Layout kLayout, typename T>
void launch_layout(const Biased<T>& g) {
  constexpr int kBytes = Stages<T, kLayout>::kBytes;
  const CooperativeMaps maps = make_cooperative_maps(g);
  const int clusters = persistent_grid<kBlockM, kBlockN, kCluster>(multiply<T, kLayout>, kThreads, kBytes, g).clusters;
  STD_CUDA_CHECK(launch_clusters(multiply<T, kLayout>, kCluster, clusters * kCluster, kThreads, kBytes, g.stream, maps, g));
}

template <typename T>
void launch(const Biased<T>& g) {
  require_rows(g);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_GEMM_BIAS_RELU(gemm_bias_relu_v04_cooperative, minfer::launch)
