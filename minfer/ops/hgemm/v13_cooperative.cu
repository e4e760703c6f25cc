// v13_cooperative: v11 as a persistent kernel, one block an SM, in clusters of two that share B, with TMA stores.
// Idea: two blocks of a cluster multiply tiles one below the other, and each copies half of the columns of B for both: a third
// fewer bytes come from the L2. A finished tile is packed into 64 registers that the next one's sums do not use, and is stored
// from there a TMA box at a time while the next tile's products run: no product waits for a store. Every other tile runs
// through k backwards, so that a wave begins with the rows of A that the L2 still has from the end of the last one.
// Expected: 1.1x over v11, most of it where the power limit decides: fewer bytes a product, and no product waits for a
// block to start or to store. At least 1.03x cuBLAS.
// Measured (H200, bfloat16, TN, float32, m=n=k=8192): 799.9 TFLOP/s cold, 683.5 steady; 102.2 % and 102.3 % of torch.
#include "cuda/gemm/cooperative.cuh"
#include "hgemm.h"

namespace minfer {

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ CooperativeMaps maps, Gemm<T> g) {
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
      sums.multiply(stages, maps, 0, steps);
      sums.take(g, scheduler.origin());
    }
    sums.finish(stages, maps);
  }
  cluster_sync_relaxed();  // no block ends while another arrives at its barriers  //@ cluster_end
}

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  constexpr int kBytes = Stages<T, kLayout>::kBytes;
  const CooperativeMaps maps = make_cooperative_maps(g);
  const int clusters = persistent_grid<kBlockM, kBlockN, kCluster>(multiply<T, kLayout>, kThreads, kBytes, g).clusters;
  STD_CUDA_CHECK(launch_clusters(multiply<T, kLayout>, kCluster, clusters * kCluster, kThreads, kBytes, g.stream, maps, g));
}

template <typename T>
void launch(const Gemm<T>& g) {
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v13_cooperative, minfer::launch)
