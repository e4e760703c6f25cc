// v07_tuned: v06 with 128x256 block tiles, eight warps of 64x64, blocks in groups, and 16-byte stores; or 256x256 if sums
// are fp16.
// Idea: a square warp tile reads the fewest shared-memory bytes a multiply-add (a third less than 64x32); blocks that
// run together form a square of the product, whose rows of A and columns of B fit the L2.
// Expected: 1.15x over v06. By shared-memory bandwidth 64x64 warps can reach what mma.sync does (the reads and writes
// of 16 steps in k take 352 cycles of an SM, the products 380 on an H200); a power-limited card gains as much by moving
// less. One block an SM, eight warps, up to 255 registers.
// Measured (H200, bfloat16, TN, float32, m=n=k=8192): 489.4 TFLOP/s cold, 452.4 steady; 62.5 % and 67.7 % of torch.
#include "cuda/gemm/block_tile.cuh"
#include "hgemm.h"

namespace minfer {

// Four stages of 32 in k, 96 KB, or where a block may have more, three of 64: half the barriers, and more under way.
constexpr bool kLarge = kMostShared >= 144 << 10;
template <typename T, typename Acc, Layout kLayout>
using Tile = BlockTile<T, Acc, kLayout, 128, 256, kLarge ? 64 : 32, kLarge ? 3 : 4, 64, 64>;

// Sums in fp16 take half of the registers: warps of 64x128 read a quarter less of shared memory, blocks a third less of L2.
// These tiles are taken where twice the size makes half as many waves, or hardly more.
template <typename T, typename Acc, Layout kLayout>
using Square = BlockTile<T, Acc, kLayout, 256, 256, kLarge ? 64 : 32, 3, 64, 128>;

template <typename Block>
__global__ void __launch_bounds__(Block::kThreads, 1) multiply(Gemm<typename Block::T> g) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto* stages = reinterpret_cast<typename Block::T*>(shared);

  const int2 place = tile_of(blockIdx.x, (g.m + Block::kBlockM - 1) / Block::kBlockM,
                             (g.n + Block::kBlockN - 1) / Block::kBlockN);
  const int row0 = place.x * Block::kBlockM, col0 = place.y * Block::kBlockN;
  typename Block::Warp sums;
  Block::multiply(sums, g, row0, col0, 0, g.k, stages);
  if (g.beta != 0.0f) return sums.store(g, row0 + Block::warp_row(), col0 + Block::warp_col());
  __syncthreads();  // no warp reads fragments any more, and each has a part of shared memory to itself
  sums.store_rows(g, row0 + Block::warp_row(), col0 + Block::warp_col(),
                  stages + threadIdx.x / 32 * Block::Warp::kStaged);  //@ staged_rows
}

template <typename Block, typename T>
int64_t tiles_of(const Gemm<T>& g) {
  return int64_t((g.m + Block::kBlockM - 1) / Block::kBlockM) * ((g.n + Block::kBlockN - 1) / Block::kBlockN);
}

template <typename Block, typename T>
int64_t waves_of(const Gemm<T>& g) {
  return (tiles_of<Block>(g) + multiprocessors() - 1) / multiprocessors();
}

template <typename Block, typename T>
void launch_tile(const Gemm<T>& g) {
  static_assert(Block::kThreads / 32 * Block::Warp::kStaged <= Block::kStages * Block::kStage);
  const int64_t grid = tiles_of<Block>(g);
  STD_TORCH_CHECK(grid <= INT_MAX, "hgemm: more output tiles than a launch has blocks");
  allow_shared(multiply<Block>, Block::kBytes);
  multiply<Block><<<dim3(grid), Block::kThreads, Block::kBytes, g.stream>>>(g);
}

template <Layout kLayout, typename Acc, typename T>
void launch_layout(const Gemm<T>& g) {
  if constexpr (std::is_same_v<Acc, Half> && kLayout == Layout::TN) {  // in NN there are no registers for its addresses
    const int64_t waves = waves_of<Tile<T, Acc, kLayout>>(g);
    if (2 * waves_of<Square<T, Acc, kLayout>>(g) <= waves + waves / 32)
      return launch_tile<Square<T, Acc, kLayout>>(g);
  }
  launch_tile<Tile<T, Acc, kLayout>>(g);
}

template <typename Acc, typename T>
void launch(const Gemm<T>& g) {
  require_vectors<T, Acc>(g);
  if constexpr (std::is_same_v<Acc, float> || std::is_same_v<T, Half>)
    g.layout == Layout::TN ? launch_layout<Layout::TN, Acc>(g) : launch_layout<Layout::NN, Acc>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v07_tuned, minfer::launch<float>)
MINFER_HGEMM(hgemm_v07_tuned_acc16, minfer::launch<minfer::Half>)
