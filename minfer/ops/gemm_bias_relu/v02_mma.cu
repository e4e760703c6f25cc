// v02_mma: hgemm's tiles of cp.async and mma.sync, with bias and ReLU on the sums in registers.
// Idea: an epilogue is free: a tile's sums are in registers anyway, and the bias of 64 columns is 128 bytes. Tiles of 64 x 64
// with eight stages in flight where larger ones leave multiprocessors idle, of 128 x 128 otherwise.
// Expected: 1024x256x512 in 8 us on an H200: 64 blocks, 16 steps of 32 each; for large squares what hgemm's v05 reaches.
// Measured (H200, float16, TN, m=n=k=8192): 370.2 TFLOP/s cold; 52.6 % of torch.
#include "gemm_bias_relu.h"
#include "ops/hgemm/block_tile.cuh"

namespace minfer {

template <typename T, Layout kLayout>
using Small = BlockTile<T, float, kLayout, 64, 64, 32, 8, 32, 32>;
template <typename T, Layout kLayout>
using Large = BlockTile<T, float, kLayout, 128, 128, 32, 4, 64, 64>;

template <typename Block>
__global__ void __launch_bounds__(Block::kThreads) multiply(Biased<typename Block::T> g) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto* stages = reinterpret_cast<typename Block::T*>(shared);
  using Warp = typename Block::Warp;

  const int2 place = tile_of(blockIdx.x, (g.m + Block::kBlockM - 1) / Block::kBlockM,
                             (g.n + Block::kBlockN - 1) / Block::kBlockN);
  const int row0 = place.x * Block::kBlockM, col0 = place.y * Block::kBlockN;
  Warp warp;
  Block::multiply(warp, g, row0, col0, 0, g.k, stages);

  const int col = col0 + Block::warp_col() + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < int(sizeof(warp.sums[0]) / sizeof(warp.sums[0][0])); ++j) {
    float bias[2] = {};
    if (col + j * 8 < g.n)
#pragma unroll
      for (int e = 0; e < 2; ++e) bias[e] = float(g.bias[col + j * 8 + e]);
#pragma unroll
    for (auto& row : warp.sums)
#pragma unroll
      for (int e = 0; e < 4; ++e) row[j][e] = relu(row[j][e] + bias[e % 2]);
  }
  __syncthreads();  // no warp reads fragments any more, and each has a part of shared memory to itself
  warp.store_rows(g, row0 + Block::warp_row(), col0 + Block::warp_col(), stages + threadIdx.x / 32 * Warp::kStaged);
}

template <typename Block, typename T>
int64_t tiles_of(const Biased<T>& g) {
  return ((int64_t(g.m) + Block::kBlockM - 1) / Block::kBlockM) * ((int64_t(g.n) + Block::kBlockN - 1) / Block::kBlockN);
}

template <typename Block, typename T>
void launch_tile(const Biased<T>& g) {
  static_assert(Block::kThreads / 32 * Block::Warp::kStaged <= Block::kStages * Block::kStage);
  const int64_t grid = tiles_of<Block>(g);
  STD_TORCH_CHECK(grid <= INT_MAX, "gemm_bias_relu: more output tiles than a launch has blocks");
  allow_shared(multiply<Block>, Block::kBytes);
  multiply<Block><<<dim3(grid), Block::kThreads, Block::kBytes, g.stream>>>(g);
}

template <Layout kLayout, typename T>
void launch_layout(const Biased<T>& g) {
  if (tiles_of<Large<T, kLayout>>(g) < multiprocessors()) return launch_tile<Small<T, kLayout>>(g);
  launch_tile<Large<T, kLayout>>(g);
}

template <typename T>
void launch(const Biased<T>& g) {
  require_rows(g);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_GEMM_BIAS_RELU(gemm_bias_relu_v02_mma, minfer::launch)
