// v06_swizzled: v05 with an XOR swizzle instead of padding, and fragments loaded 16 steps in k ahead.
// Idea: a row's 16-byte pieces are permuted by the row's number, so rows lie densely and eight of them still hit eight
// different banks; ldmatrix for the next product is issued before the current one, which hides its latency.
// Expected: 1.2x over v05. A second set of fragments takes registers, so a warp has 64x64 and a block four warps; that
// also reads a third less of shared memory a multiply-add. Three dense stages take 48 KB instead of 60, so that two
// blocks fit an SM even on sm_89 (100 KB). Measured: see README.md.
#include "warp_tile.cuh"

namespace minfer {

constexpr int kBlockM = 128, kBlockN = 128, kBlockK = 32, kStages = 3;
constexpr int kWarpM = 64, kWarpN = 64;
constexpr int kThreads = 32 * (kBlockM / kWarpM) * (kBlockN / kWarpN);
constexpr int kA = kBlockM * kBlockK, kStage = kA + kBlockN * kBlockK;  // elements

template <typename T, typename Acc, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 2) multiply(Gemm<T> g) {
  constexpr bool kTN = kLayout == Layout::TN;
  constexpr int kBRows = kTN ? kBlockN : kBlockK, kBCols = kTN ? kBlockK : kBlockN;
  using PlaceA = Swizzled<kBlockK>;
  using PlaceB = Swizzled<kBCols>;
  using Warp = WarpTile<T, Acc, kLayout, kWarpM, kWarpN>;
  extern __shared__ __align__(128) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);

  const int warp = threadIdx.x / 32;
  const int warp_row = warp / (kBlockN / kWarpN) * kWarpM, warp_col = warp % (kBlockN / kWarpN) * kWarpN;
  const int row0 = blockIdx.y * kBlockM, col0 = blockIdx.x * kBlockN;
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
  sums.store(g, row0 + warp_row, col0 + warp_col);
}

template <Layout kLayout, typename Acc, typename T>
void launch_layout(const Gemm<T>& g) {
  constexpr int kBytes = kStages * kStage * sizeof(T);
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

MINFER_HGEMM(hgemm_v06_swizzled, minfer::launch<float>)
MINFER_HGEMM(hgemm_v06_swizzled_acc16, minfer::launch<minfer::Half>)
