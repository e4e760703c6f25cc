// v07_tuned: v06 with 128x256x32 block tiles, eight warps of 64x64, blocks in groups, and 16-byte stores.
// Idea: a square warp tile reads the fewest shared-memory bytes a multiply-add (a third less than 64x32); blocks that
// run together form a square of the product, whose rows of A and columns of B fit the L2.
// Expected: 1.15x over v06. By shared-memory bandwidth 64x64 warps can reach what mma.sync does (the reads and writes
// of 16 steps in k take 352 cycles of an SM, the products 380 on an H200); a power-limited card gains as much by moving
// less. One block an SM, eight warps, up to 255 registers. Measured: see README.md.
#include "warp_tile.cuh"

namespace minfer {

constexpr int kBlockM = 128, kBlockN = 256, kBlockK = 32, kStages = 4;
constexpr int kWarpM = 64, kWarpN = 64;
constexpr int kThreads = 32 * (kBlockM / kWarpM) * (kBlockN / kWarpN);
constexpr int kA = kBlockM * kBlockK, kStage = kA + kBlockN * kBlockK;  // elements
constexpr int kGroup = 16;  // rows of blocks; with 8 columns of blocks, 2048x2048 of the product run together

// Which tile a block multiplies: groups of kGroup rows of tiles, column by column within a group.
__device__ inline int2 tile_of(int block, int tiles_m, int tiles_n) {
  const int group = block / (kGroup * tiles_n), within = block - group * kGroup * tiles_n;
  const int rows = min(kGroup, tiles_m - group * kGroup);
  return {group * kGroup + within % rows, within / rows};
}

template <typename T, typename Acc, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 1) multiply(Gemm<T> g) {
  constexpr bool kTN = kLayout == Layout::TN;
  constexpr int kBRows = kTN ? kBlockN : kBlockK, kBCols = kTN ? kBlockK : kBlockN;
  using PlaceA = Swizzled<kBlockK>;
  using PlaceB = Swizzled<kBCols>;
  using Warp = WarpTile<T, Acc, kLayout, kWarpM, kWarpN>;
  extern __shared__ __align__(128) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);

  const int warp = threadIdx.x / 32;
  const int warp_row = warp / (kBlockN / kWarpN) * kWarpM, warp_col = warp % (kBlockN / kWarpN) * kWarpN;
  const int2 place = tile_of(blockIdx.x, (g.m + kBlockM - 1) / kBlockM, (g.n + kBlockN - 1) / kBlockN);
  const int row0 = place.x * kBlockM, col0 = place.y * kBlockN;
  const int tiles = (g.k + kBlockK - 1) / kBlockK;

  TileCopy<PlaceA, false, kBlockM, kBlockK, kThreads, T> a(g.a, g.lda, row0, 0, g.m, g.k);
  TileCopy<PlaceB, !kTN, kBRows, kBCols, kThreads, T> b(g.b, g.ldb, kTN ? col0 : 0, kTN ? 0 : col0, kTN ? g.n : g.k,
                                                  kTN ? g.k : g.n);
  int filled = 0, used = 0;  // the stage to fill next, and the one whose fragments are loaded next
  const auto next = [](int stage) { return stage + 1 == kStages ? 0 : stage + 1; };
  const auto copy = [&](int tile) {
    T* stage = stages + filled * kStage;
    if (tile < tiles) a.start(stage), b.start(stage + kA);
    cp_async_commit();  // an empty group too, so that the groups in flight are always as many
    filled = next(filled);
  };

  Warp sums;
  typename Warp::Fragments fragments[2];  // of the current 16 steps in k, and of the next
  const auto load = [&](int k, int into) {
    const T* stage = stages + used * kStage;
    Warp::template load<PlaceA, PlaceB>(fragments[into], stage, stage + kA, warp_row, warp_col, k);
  };

  for (int tile = 0; tile < kStages - 1; ++tile) copy(tile);
  cp_async_wait<kStages - 2>();
  __syncthreads();
  load(0, 0);
  for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      const bool last = step + 1 == kBlockK / 16;
      if (last) {  // all fragments of this tile are loaded; the next tile must have arrived
        cp_async_wait<kStages - 2>();
        __syncthreads();
        used = next(used);
      }
      load(last ? 0 : (step + 1) * 16, (step + 1) % 2);
      if (step == 0) copy(tile + kStages - 1);  // to the place of the tile before
      sums.multiply(fragments[step % 2]);
    }
  }
  if (g.beta != 0.0f) return sums.store(g, row0 + warp_row, col0 + warp_col);
  __syncthreads();  // no warp reads fragments any more, and each has a part of shared memory to itself
  sums.store_rows(g, row0 + warp_row, col0 + warp_col, stages + warp * Warp::kStaged);
}

template <Layout kLayout, typename Acc, typename T>
void launch_layout(const Gemm<T>& g) {
  constexpr int kBytes = kStages * kStage * sizeof(T);
  static_assert(kThreads / 32 * WarpTile<T, Acc, kLayout, kWarpM, kWarpN>::kStaged <= kStages * kStage);
  static_assert(kBytes <= 99 << 10, "more than a block has on sm_89");
  const int64_t grid = int64_t((g.m + kBlockM - 1) / kBlockM) * ((g.n + kBlockN - 1) / kBlockN);
  STD_TORCH_CHECK(grid <= INT_MAX, "hgemm: more output tiles than a launch has blocks");
  allow_shared(multiply<T, Acc, kLayout>, kBytes);
  multiply<T, Acc, kLayout><<<dim3(grid), kThreads, kBytes, g.stream>>>(g);
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
