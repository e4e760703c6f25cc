// v05_pipelined: v04 with cp.async and four tiles in flight or in use.
// Idea: copies go to shared memory past the registers while the warps multiply what came before, three tiles ahead.
// Expected: 1.5x over v04: memory latency is hidden, and there is one barrier a tile instead of two. What is left is the
// wait for ldmatrix at the head of each 16 steps.
// Measured (H200, bfloat16, TN, float32, m=n=k=8192): 284.0 TFLOP/s cold, 265.6 steady; 36.3 % and 39.7 % of torch.
#include "cuda/gemm/warp_tile.cuh"
#include "hgemm.h"

namespace minfer {

constexpr int kBlockM = 128, kBlockN = 128, kBlockK = 32, kStages = 4;
constexpr int kWarpM = 64, kWarpN = 32;
constexpr int kThreads = 32 * (kBlockM / kWarpM) * (kBlockN / kWarpN);

template <Layout kLayout>
struct Stage {
  static constexpr bool kTN = kLayout == Layout::TN;
  static constexpr int kBRows = kTN ? kBlockN : kBlockK, kBCols = kTN ? kBlockK : kBlockN;
  using PlaceA = Padded<kBlockK>;
  using PlaceB = Padded<kBCols>;
  static constexpr int kA = kBlockM * PlaceA::kStride, kSize = kA + kBRows * PlaceB::kStride;  // elements
};

template <typename T, typename Acc, Layout kLayout>
__global__ void __launch_bounds__(kThreads) multiply(Gemm<T> g) {
  using S = Stage<kLayout>;
  using Warp = WarpTile<T, Acc, kLayout, kWarpM, kWarpN>;
  constexpr bool kTN = S::kTN;
  extern __shared__ __align__(128) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);

  const int warp = threadIdx.x / 32;
  const int warp_row = warp / (kBlockN / kWarpN) * kWarpM, warp_col = warp % (kBlockN / kWarpN) * kWarpN;
  const int row0 = blockIdx.y * kBlockM, col0 = blockIdx.x * kBlockN;
  const int tiles = (g.k + kBlockK - 1) / kBlockK;

  TileCopy<typename S::PlaceA, false, kBlockM, kBlockK, kThreads, T> a(g.a, g.lda, row0, 0, g.m, g.k);
  TileCopy<typename S::PlaceB, !kTN, S::kBRows, S::kBCols, kThreads, T> b(
      g.b, g.ldb, kTN ? col0 : 0, kTN ? 0 : col0, kTN ? g.n : g.k, kTN ? g.k : g.n);
  const auto copy = [&](int tile) {
    T* stage = stages + tile % kStages * S::kSize;
    if (tile < tiles) a.start(stage), b.start(stage + S::kA);
    cp_async_commit();  // an empty group too, so that the groups in flight are always as many
  };

  Warp sums;
  for (int tile = 0; tile < kStages - 1; ++tile) copy(tile);
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<kStages - 2>();  //@ stage_arrived
    //@ stage_read
    __syncthreads();  // all have waited for their part of this tile, and are done with the one before,
    copy(tile + kStages - 1);  // whose place is the next to be filled
    const T* stage = stages + tile % kStages * S::kSize;
#pragma unroll
    for (int k = 0; k < kBlockK; k += 16) {
      typename Warp::Fragments fragments;
      Warp::template load<typename S::PlaceA, typename S::PlaceB>(fragments, stage, stage + S::kA, warp_row, warp_col, k);
      sums.multiply(fragments);
    }
  }
  sums.store(g, row0 + warp_row, col0 + warp_col);
}

template <Layout kLayout, typename Acc, typename T>
void launch_layout(const Gemm<T>& g) {
  constexpr int kBytes = kStages * Stage<kLayout>::kSize * sizeof(T);
  static_assert(kBytes <= 99 << 10, "more than a block has on sm_89");
  const dim3 grid((g.n + kBlockN - 1) / kBlockN, (g.m + kBlockM - 1) / kBlockM);
  allow_shared(multiply<T, Acc, kLayout>, kBytes);
  multiply<T, Acc, kLayout><<<grid, kThreads, kBytes, g.stream>>>(g);
}

template <typename Acc, typename T>
void launch(const Gemm<T>& g) {
  require_vectors<T, Acc>(g);
  if constexpr (std::is_same_v<Acc, float> || std::is_same_v<T, Half>)
    g.layout == Layout::TN ? launch_layout<Layout::TN, Acc>(g) : launch_layout<Layout::NN, Acc>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v05_pipelined, minfer::launch<float>)
MINFER_HGEMM(hgemm_v05_pipelined_acc16, minfer::launch<minfer::Half>)
