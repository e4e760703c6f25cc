// v09_a_stationary: a block keeps its part of A and iterates over B; its products are added to C with atomicAdd.
// Idea, and its flaw: A is read once, and no block needs another, so all SMs are busy at any shape. But 128x64 of A is a
// sum over 64 of k: every element of C is added to K / 64 times, in memory, in fp32.
// Expected: far below v07 (at 8192 8.6 billion atomics, 34 GB of additions, where the operands are 0.4 GB). The bits
// differ in every run, because floating-point addition is not associative and the order is random. The counter-example to
// v08.
// Measured (H200, bfloat16, TN, float32, m=n=k=8192): 33.69 TFLOP/s cold, 33.46 steady; 4.31 % and 5.01 % of torch.
#include "cuda/counters.cuh"
#include "cuda/gemm/warp_tile.cuh"
#include "hgemm.h"

namespace minfer {

constexpr int kBlockM = 128, kBlockN = 128, kBlockK = 64;
constexpr int kWarpM = 64, kWarpN = 32;
constexpr int kThreads = 32 * (kBlockM / kWarpM) * (kBlockN / kWarpN);
constexpr int kA = kBlockM * kBlockK, kB = kBlockN * kBlockK;  // elements

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 1) a_stationary(Gemm<T> g, float* product) {
  constexpr bool kTN = kLayout == Layout::TN;
  constexpr int kBRows = kTN ? kBlockN : kBlockK, kBCols = kTN ? kBlockK : kBlockN;
  using PlaceA = Swizzled<kBlockK>;
  using PlaceB = Swizzled<kBCols>;
  using Warp = WarpTile<T, float, kLayout, kWarpM, kWarpN>;
  extern __shared__ __align__(128) unsigned char shared[];
  T* a_tile = reinterpret_cast<T*>(shared);
  T* b_tiles = a_tile + kA;  // two of them

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp / (kBlockN / kWarpN) * kWarpM, warp_col = warp % (kBlockN / kWarpN) * kWarpN;
  const int row0 = blockIdx.y * kBlockM, k0 = blockIdx.x * kBlockK, k1 = min(g.k, k0 + kBlockK);
  const int tiles = (g.n + kBlockN - 1) / kBlockN;

  TileCopy<PlaceA, false, kBlockM, kBlockK, kThreads, T> a(g.a, g.lda, row0, k0, g.m, k1);
  TileCopy<PlaceB, kTN, kBRows, kBCols, kThreads, T> b(g.b, g.ldb, kTN ? 0 : k0, kTN ? k0 : 0, kTN ? g.n : k1,
                                                 kTN ? k1 : g.n);
  a.start(a_tile), b.start(b_tiles);
  cp_async_commit();
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) b.start(b_tiles + (tile + 1) % 2 * kB);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    Warp part;
#pragma unroll
    for (int k = 0; k < kBlockK; k += 16) {
      typename Warp::Fragments fragments;
      Warp::template load<PlaceA, PlaceB>(fragments, a_tile, b_tiles + tile % 2 * kB, warp_row, warp_col, k);
      part.multiply(fragments);
    }
    __syncthreads();  // before the next copies overwrite this tile
#pragma unroll
    for (int i = 0; i < kWarpM / 16; ++i)
#pragma unroll
      for (int j = 0; j < kWarpN / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = row0 + warp_row + i * 16 + e / 2 * 8 + lane / 4;
          const int col = tile * kBlockN + warp_col + j * 8 + lane % 4 * 2 + e % 2;
          if (row < g.m && col < g.n) atomicAdd(product + int64_t(row) * g.n + col, part.sums[i][j][e]);
        }
  }
  cp_async_wait<0>();
}

template <typename T>
__global__ void finish(Gemm<T> g, const float* product) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  for (int row = blockIdx.y; row < g.m; row += gridDim.y) {
    if (col >= g.n) return;
    T* c = g.c + row * g.ldc + col;
    *c = T(g.alpha * product[int64_t(row) * g.n + col] + (g.beta != 0.0f ? g.beta * float(*c) : 0.0f));
  }
}

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g, float* product) {
  constexpr int kBytes = (kA + 2 * kB) * sizeof(T);
  static_assert(kBytes <= 99 << 10, "more than a block has on sm_89");
  const dim3 grid((g.k + kBlockK - 1) / kBlockK, (g.m + kBlockM - 1) / kBlockM);
  allow_shared(a_stationary<T, kLayout>, kBytes);
  a_stationary<T, kLayout><<<grid, kThreads, kBytes, g.stream>>>(g, product);
}

template <typename T>
void launch(const Gemm<T>& g) {
  require_vectors<T, float>(g);
  const auto sums = scratch_words(int64_t(g.m) * g.n);
  float* product = static_cast<float*>(sums.mutable_data_ptr());
  STD_CUDA_CHECK(cudaMemsetAsync(product, 0, int64_t(g.m) * g.n * sizeof(float), g.stream));
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g, product) : launch_layout<Layout::NN>(g, product);
  finish<T><<<dim3((g.n + 255) / 256, min(g.m, 65535)), 256, 0, g.stream>>>(g, product);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v09_a_stationary, minfer::launch)
