// v07_tuned: v06 with 128x256 block tiles, eight warps of 64x64, blocks in groups, and 16-byte stores.
// Idea: a square warp tile reads the fewest shared-memory bytes a multiply-add (a third less than 64x32); blocks that
// run together form a square of the product, whose rows of A and columns of B fit the L2.
// Expected: 1.15x over v06. By shared-memory bandwidth 64x64 warps can reach what mma.sync does (the reads and writes
// of 16 steps in k take 352 cycles of an SM, the products 380 on an H200); a power-limited card gains as much by moving
// less. One block an SM, eight warps, up to 255 registers. Measured: see README.md.
#include "block_tile.cuh"

namespace minfer {

// Four stages of 32 in k, 96 KB, or where a block may have more, three of 64: half the barriers, and more under way.
constexpr bool kLarge = kMostShared >= 144 << 10;

template <typename T, typename Acc, Layout kLayout>
using Tile = BlockTile<T, Acc, kLayout, 128, 256, kLarge ? 64 : 32, kLarge ? 3 : 4, 64, 64>;

template <typename T, typename Acc, Layout kLayout>
__global__ void __launch_bounds__(Tile<T, Acc, kLayout>::kThreads, 1) multiply(Gemm<T> g) {
  using Block = Tile<T, Acc, kLayout>;
  extern __shared__ __align__(128) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);

  const int2 place = tile_of(blockIdx.x, (g.m + Block::kBlockM - 1) / Block::kBlockM,
                             (g.n + Block::kBlockN - 1) / Block::kBlockN);
  const int row0 = place.x * Block::kBlockM, col0 = place.y * Block::kBlockN;
  typename Block::Warp sums;
  Block::multiply(sums, g, row0, col0, 0, g.k, stages);
  if (g.beta != 0.0f) return sums.store(g, row0 + Block::warp_row(), col0 + Block::warp_col());
  __syncthreads();  // no warp reads fragments any more, and each has a part of shared memory to itself
  sums.store_rows(g, row0 + Block::warp_row(), col0 + Block::warp_col(),
                  stages + threadIdx.x / 32 * Block::Warp::kStaged);
}

template <Layout kLayout, typename Acc, typename T>
void launch_layout(const Gemm<T>& g) {
  using Block = Tile<T, Acc, kLayout>;
  static_assert(Block::kThreads / 32 * Block::Warp::kStaged <= Block::kStages * Block::kStage);
  const int64_t grid =
      int64_t((g.m + Block::kBlockM - 1) / Block::kBlockM) * ((g.n + Block::kBlockN - 1) / Block::kBlockN);
  STD_TORCH_CHECK(grid <= INT_MAX, "hgemm: more output tiles than a launch has blocks");
  allow_shared(multiply<T, Acc, kLayout>, Block::kBytes);
  multiply<T, Acc, kLayout><<<dim3(grid), Block::kThreads, Block::kBytes, g.stream>>>(g);
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
