// v02_mma: mma.sync for both products in one sweep of k, with cp.async and four stages in shared memory.
// Idea: a stage has a tile of x and one of each weight, and a warp multiplies its fragments of x with both: its two sums are
// of the same rows and columns, so that biases, gate and product stay in registers, and y is all that is written. Tiles are
// those of hgemm's v07: 128 x (128 + 128), or 128 x (64 + 64) where y is narrow.
// Expected: on an H200 what hgemm's v07 has for one product of 2 n columns, 430 TFLOP/s for large squares; at
// (1048576, 128) x (128, 64) half of memory's speed, because a block loads, multiplies and stores one after the other.
// Measured (H200, float16, sigmoid, NN, m=n=k=8192): 321.2 TFLOP/s cold; 52.9 % of torch.
#include "cuda/gemm/block_tile.cuh"
#include "gated_unit.h"

namespace minfer {

constexpr int kWarpM = 64, kWarpN = 32;  // of y: two such sums take 128 registers

template <typename T_, Layout kLayout_, int kBlockM_, int kBlockN_, int kStages_>
struct Shape {
  using T = T_;
  static constexpr Layout kLayout = kLayout_;
  static constexpr bool kTN = kLayout == Layout::TN;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = 32, kStages = kStages_;
  static constexpr int kWarpsN = kBlockN / kWarpN, kThreads = 32 * (kBlockM / kWarpM) * kWarpsN;
  using Warp = WarpTile<T, float, kLayout, kWarpM, kWarpN>;
  static constexpr int kRows = kTN ? kBlockN : kBlockK, kCols = kTN ? kBlockK : kBlockN;  // of a weight's tile
  using PlaceX = Swizzled<kBlockK>;
  using PlaceW = Swizzled<kCols>;
  static constexpr int kX = kBlockM * kBlockK, kW = kBlockN * kBlockK, kStage = kX + 2 * kW;  // elements
  static constexpr int kBytes = kStages * kStage * sizeof(T);
  static_assert(kBytes <= 99 << 10 && kThreads / 32 * Warp::kStaged <= kStages * kStage);
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) multiply(Gated<typename Shape::T> g) {
  using T = typename Shape::T;
  using Warp = typename Shape::Warp;
  using CopyW = TileCopy<typename Shape::PlaceW, !Shape::kTN, Shape::kRows, Shape::kCols, Shape::kThreads, T>;
  constexpr bool kTN = Shape::kTN;
  extern __shared__ __align__(128) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);

  const int2 place = tile_of(blockIdx.x, (g.m + Shape::kBlockM - 1) / Shape::kBlockM,
                             (g.n + Shape::kBlockN - 1) / Shape::kBlockN);
  const int row0 = place.x * Shape::kBlockM, col0 = place.y * Shape::kBlockN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / Shape::kWarpsN * kWarpM, col = warp % Shape::kWarpsN * kWarpN;
  const int tiles = (g.k + Shape::kBlockK - 1) / Shape::kBlockK;

  TileCopy<typename Shape::PlaceX, false, Shape::kBlockM, Shape::kBlockK, Shape::kThreads, T> x(g.a, g.lda, row0, 0, g.m,
                                                                                               g.k);
  CopyW w1(g.b, g.ldb, kTN ? col0 : 0, kTN ? 0 : col0, kTN ? g.n : g.k, kTN ? g.k : g.n);
  CopyW w2(g.w2, g.ldw2, kTN ? col0 : 0, kTN ? 0 : col0, kTN ? g.n : g.k, kTN ? g.k : g.n);
  const auto copy = [&](int tile) {
    T* stage = stages + tile % Shape::kStages * Shape::kStage;
    if (tile < tiles) x.start(stage), w1.start(stage + Shape::kX), w2.start(stage + Shape::kX + Shape::kW);
    cp_async_commit();  // an empty group too, so that the groups in flight are always as many
  };

  Warp first, second;
  for (int tile = 0; tile < Shape::kStages - 1; ++tile) copy(tile);
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<Shape::kStages - 2>();
    __syncthreads();  // all have waited for their part of this tile, and are done with the one before,
    copy(tile + Shape::kStages - 1);  // whose place is the next to be filled
    const T* stage = stages + tile % Shape::kStages * Shape::kStage;
#pragma unroll
    for (int k = 0; k < Shape::kBlockK; k += 16) {
      typename Warp::Fragments one, other;
      Warp::template load_a<typename Shape::PlaceX>(one, stage, row, k, lane);
      Warp::template load_b<typename Shape::PlaceW>(one, stage + Shape::kX, col, k, 0, lane);
      Warp::template load_b<typename Shape::PlaceW>(other, stage + Shape::kX + Shape::kW, col, k, 0, lane);
      first.multiply(one.a, one.b, 0);
      second.multiply(one.a, other.b, 0);
    }
  }

#pragma unroll
  for (int j = 0; j < kWarpN / 8; ++j) {  // 8 columns, of which a thread has two neighbours in each of its rows
    const int at = col0 + col + j * 8 + lane % 4 * 2;
    float bias1[2] = {}, bias2[2] = {};
    if (g.bias1 && at < g.n)
#pragma unroll
      for (int e = 0; e < 2; ++e) bias1[e] = float(g.bias1[at + e]), bias2[e] = float(g.bias2[at + e]);
#pragma unroll
    for (int i = 0; i < kWarpM / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        first.sums[i][j][e] = gated(first.sums[i][j][e] + bias1[e % 2], second.sums[i][j][e] + bias2[e % 2], g.silu);  //@ bias
  }
  __syncthreads();  // no warp reads fragments any more, and each has a part of shared memory to itself
  first.store_rows(g, row0 + row, col0 + col, stages + warp * Warp::kStaged);
}

template <typename Shape, typename T>
void launch_shape(const Gated<T>& g) {
  const int64_t grid = ((int64_t(g.m) + Shape::kBlockM - 1) / Shape::kBlockM) *
                       ((int64_t(g.n) + Shape::kBlockN - 1) / Shape::kBlockN);
  STD_TORCH_CHECK(grid <= INT_MAX, "gated_unit: more output tiles than a launch has blocks");
  allow_shared(multiply<Shape>, Shape::kBytes);
  multiply<Shape><<<dim3(grid), Shape::kThreads, Shape::kBytes, g.stream>>>(g);
}

template <Layout kLayout, typename T>
void launch_layout(const Gated<T>& g) {
  if (g.n <= 64) return launch_shape<Shape<T, kLayout, 128, 64, 3>>(g);  // 48 KB, so that an SM holds several
  launch_shape<Shape<T, kLayout, 128, 128, 4>>(g);
}

template <typename T>
void launch(const Gated<T>& g) {
  require_rows(g);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_GATED_UNIT(gated_unit_v02_mma, minfer::launch)
