// Tiles of cp.async and mma.sync, with a bias and an activation on the sums in registers.
#pragma once

#include "cuda/gemm/block_tile.cuh"
#include "ops/gemm_bias.h"

namespace minfer {

template <typename T, Layout kLayout>
using Small = BlockTile<T, float, kLayout, 64, 64, 32, 8, 32, 32>;
template <typename T, Layout kLayout>
using Large = BlockTile<T, float, kLayout, 128, 128, 32, 4, 64, 64>;

template <typename Block, typename Activation>
__global__ void __launch_bounds__(Block::kThreads) multiply(Biased<typename Block::T> g, Activation activation) {
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
      for (int e = 0; e < 4; ++e) row[j][e] = activation(row[j][e] + bias[e % 2]);
  }
  __syncthreads();  // no warp reads fragments any more, and each has a part of shared memory to itself
  warp.store_rows(g, row0 + Block::warp_row(), col0 + Block::warp_col(), stages + threadIdx.x / 32 * Warp::kStaged);
}

template <typename Block, typename T>
int64_t tiles_of(const Biased<T>& g) {
  return ((int64_t(g.m) + Block::kBlockM - 1) / Block::kBlockM) * ((int64_t(g.n) + Block::kBlockN - 1) / Block::kBlockN);
}

template <typename Block, typename T, typename Activation>
void launch_tile(const Biased<T>& g, Activation activation) {
  static_assert(Block::kThreads / 32 * Block::Warp::kStaged <= Block::kStages * Block::kStage);
  const int64_t grid = tiles_of<Block>(g);
  STD_TORCH_CHECK(grid <= INT_MAX, MINFER_BIASED ": more output tiles than a launch has blocks");
  allow_shared(multiply<Block, Activation>, Block::kBytes);
  multiply<Block><<<dim3(grid), Block::kThreads, Block::kBytes, g.stream>>>(g, activation);
}

template <Layout kLayout, typename T, typename Activation>
void launch_layout(const Biased<T>& g, Activation activation) {
  if (tiles_of<Large<T, kLayout>>(g) < multiprocessors()) return launch_tile<Small<T, kLayout>>(g, activation);
  launch_tile<Large<T, kLayout>>(g, activation);
}

template <typename T, typename Activation>
void launch_mma(const Biased<T>& g, Activation activation) {
  require_rows(g);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g, activation) : launch_layout<Layout::NN>(g, activation);
}

}  // namespace minfer
