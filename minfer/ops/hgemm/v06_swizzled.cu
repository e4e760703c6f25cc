// v06_swizzled: v05 with an XOR swizzle instead of padding, and fragments loaded 16 steps in k ahead.
// Idea: a row's 16-byte pieces are permuted by the row's number, so rows lie densely and eight of them still hit eight
// different banks; ldmatrix for the next product is issued before the current one, which hides its latency.
// Expected: 1.2x over v05. A second set of fragments takes registers, so a warp has 64x64 and a block four warps; that
// also reads a third less of shared memory a multiply-add. Three dense stages take 48 KB instead of 60, so that two
// blocks fit an SM even on sm_89 (100 KB).
// Measured (H200, bfloat16, TN, float32, m=n=k=8192): 424.0 TFLOP/s cold, 376.0 steady; 54.2 % and 56.3 % of torch.
#include "cuda/gemm/block_tile.cuh"
#include "hgemm.h"

namespace minfer {

template <typename T, typename Acc, Layout kLayout>
using Tile = BlockTile<T, Acc, kLayout, 128, 128, 32, 3, 64, 64>;

template <typename T, typename Acc, Layout kLayout>
__global__ void __launch_bounds__(Tile<T, Acc, kLayout>::kThreads, 2) multiply(Gemm<T> g) {
  using Block = Tile<T, Acc, kLayout>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int row0 = blockIdx.y * Block::kBlockM, col0 = blockIdx.x * Block::kBlockN;
  typename Block::Warp sums;
  Block::multiply(sums, g, row0, col0, 0, g.k, reinterpret_cast<T*>(shared));
  sums.store(g, row0 + Block::warp_row(), col0 + Block::warp_col());
}

template <Layout kLayout, typename Acc, typename T>
void launch_layout(const Gemm<T>& g) {
  using Block = Tile<T, Acc, kLayout>;
  const dim3 grid((g.n + Block::kBlockN - 1) / Block::kBlockN, (g.m + Block::kBlockM - 1) / Block::kBlockM);
  allow_shared(multiply<T, Acc, kLayout>, Block::kBytes);
  multiply<T, Acc, kLayout><<<grid, Block::kThreads, Block::kBytes, g.stream>>>(g);
}

template <typename Acc, typename T>
void launch(const Gemm<T>& g) {
  require_vectors<T, Acc>(g);
  if constexpr (std::is_same_v<Acc, float> || std::is_same_v<T, Half>)
    g.layout == Layout::TN ? launch_layout<Layout::TN, Acc>(g) : launch_layout<Layout::NN, Acc>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v06_swizzled, minfer::launch<float>)
MINFER_HGEMM(hgemm_v06_swizzled_acc16, minfer::launch<minfer::Half>)
