// v08_fp8_promoted: v05 whose threads add the tensor cores' sums of 128 products to sums in fp32 registers.
// Idea: fp8 tensor cores keep about 13 bits of a sum (docs/quant_gemm.md), so the error of a sum over all of k grows with k. Here
// four wgmma sum the 128 products of a stage, in 64 x 128 results, and each thread adds its 64 of them to the tile's sums. A
// warpgroup waits for its wgmma, while the tensor cores run the other warpgroup's. The two halves of 128 columns use the same 64
// registers for the tensor cores' sums in turn, and 128 registers hold the sums of v05's tile of 128 x 256. No registers are left
// to store a tile while the next one is computed.
// Expected: the four wgmma take the tensor cores 256 cycles, and the 64 additions take each scheduler 64 cycles, in which the
// other warpgroup's wgmma run: v05's 1520 TFLOP/s less the waits. v04 has 330.
// Measured (H200, bfloat16, fp8_fp8, promoted, m=n=k=8192): 1371 TFLOP/s cold.
#include "cuda/gemm/cooperative.cuh"
#include "cuda/gemm/promoted.cuh"
#include "fp8_wgmma.cuh"

namespace minfer {

constexpr int kPartN = 128;  // columns of one product of wgmma

// The sums of one consumer warpgroup.
template <typename Out>
struct PromotedSums {
  using All = Stages<E4M3Pair, Layout::TN, Out>;
  using Tile = typename All::Tile;

  const int row = warpgroup_index() * kRows;  // the first, of the block's
  Tile tile;

  __device__ void multiply(All& from, int steps) {
#pragma unroll
    for (float& sum : tile.sums[0]) sum = 0.0f;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, from.ring.advance()) {
      from.wait_full();
      add_products<kBlockN / kPartN>(tile.sums[0], from.stage() + row * kBlockK, from.stage() + All::Tiles::kA);
      from.release(from.ring.stage);
    }
  }

  __device__ void store(const All& from, const Maps& maps, int2 origin) {
    Out* boxes = from.boxes + warpgroup_index() * 4 * Tile::kBox;
    tile.template store_boxes<1>(maps, boxes, origin.x + row, origin.y);
  }
};

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
    PromotedSums<Out> sums;
    for (; scheduler.goes_on(); scheduler.advance(1)) {
      const int2 origin = scheduler.origin();
      sums.multiply(stages, steps);
      scale_tile<kBlockN>(sums.tile.sums[0], g, origin.x + sums.row, [&](int j) {
        const int col = origin.y + j * 8 + threadIdx.x % 4 * 2;
        return col < g.n ? *reinterpret_cast<const float2*>(g.w_scales + col) : float2{};
      });
      sums.store(stages, maps, origin);
    }
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
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

MINFER_QUANT_GEMM_OF(quant_gemm_v08_fp8_promoted, false, true, minfer::launch)
