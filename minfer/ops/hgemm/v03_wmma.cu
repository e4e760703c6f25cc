// v03_wmma: tensor cores through the WMMA API; 128x128x32 block tiles, eight warps of 64x32.
// Idea: one warp instruction multiplies 16x16x16, and a fragment loaded once serves two to four of them.
// Expected: 10x over v02; loads are still 2 bytes wide and not overlapped with arithmetic.
// Measured (H200, bfloat16, TN, float32, m=n=k=8192): 47.87 TFLOP/s cold, 47.29 steady; 6.12 % and 7.08 % of torch.
// Why: not 10x. The tensor pipe is 7 % busy, because every load is 2 bytes wide and no load overlaps a product. At 512 it is
//   slower than v02: 16 tiles of 128x128 occupy 16 of 132 SMs.
#include <mma.h>

#include "hgemm.h"

namespace minfer {

namespace wmma = nvcuda::wmma;

constexpr int kBlockM = 128, kBlockN = 128, kBlockK = 32;
constexpr int kWarpM = 64, kWarpN = 32, kFrag = 16;
constexpr int kThreads = 32 * (kBlockM / kWarpM) * (kBlockN / kWarpN);
constexpr int kPad = 8;  // elements; keeps rows 16-byte aligned, as WMMA asks, and off each other's banks

// Copies a rows x cols tile, whose top left is (row0, col0) of a row-major matrix, filling with zeros outside it.
template <int kRows, int kCols, typename T>
__device__ void load_tile(T (*tile)[kCols + kPad], const T* source, int64_t ld, int row0, int col0, int rows, int cols) {
  for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) {
    const int r = i / kCols, c = i % kCols;
    const bool inside = row0 + r < rows && col0 + c < cols;
    tile[r][c] = inside ? source[(row0 + r) * ld + col0 + c] : T(0.0f);
  }
}

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads) multiply(Gemm<T> g) {
  constexpr bool kTN = kLayout == Layout::TN;
  constexpr int kBRows = kTN ? kBlockN : kBlockK, kBCols = kTN ? kBlockK : kBlockN;
  using BMajor = std::conditional_t<kTN, wmma::col_major, wmma::row_major>;

  __shared__ alignas(16) T a_tile[kBlockM][kBlockK + kPad];
  __shared__ alignas(16) T b_tile[kBRows][kBCols + kPad];
  __shared__ alignas(16) float c_tile[kThreads / 32][kFrag][kFrag];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / (kBlockN / kWarpN) * kWarpM, warp_col = warp % (kBlockN / kWarpN) * kWarpN;
  const int row0 = blockIdx.y * kBlockM, col0 = blockIdx.x * kBlockN;

  wmma::fragment<wmma::accumulator, kFrag, kFrag, kFrag, float> acc[kWarpM / kFrag][kWarpN / kFrag];
  for (auto& row : acc)
    for (auto& fragment : row) wmma::fill_fragment(fragment, 0.0f);

  for (int k0 = 0; k0 < g.k; k0 += kBlockK) {
    load_tile<kBlockM, kBlockK>(a_tile, g.a, g.lda, row0, k0, g.m, g.k);
    if constexpr (kTN)
      load_tile<kBRows, kBCols>(b_tile, g.b, g.ldb, col0, k0, g.n, g.k);
    else
      load_tile<kBRows, kBCols>(b_tile, g.b, g.ldb, k0, col0, g.k, g.n);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kBlockK; k += kFrag) {
      wmma::fragment<wmma::matrix_a, kFrag, kFrag, kFrag, T, wmma::row_major> a[kWarpM / kFrag];
      wmma::fragment<wmma::matrix_b, kFrag, kFrag, kFrag, T, BMajor> b[kWarpN / kFrag];
#pragma unroll
      for (int i = 0; i < kWarpM / kFrag; ++i)
        wmma::load_matrix_sync(a[i], &a_tile[warp_row + i * kFrag][k], kBlockK + kPad);
#pragma unroll
      for (int j = 0; j < kWarpN / kFrag; ++j) {
        const int col = warp_col + j * kFrag;
        wmma::load_matrix_sync(b[j], kTN ? &b_tile[col][k] : &b_tile[k][col], kBCols + kPad);
      }
#pragma unroll
      for (int i = 0; i < kWarpM / kFrag; ++i)
#pragma unroll
        for (int j = 0; j < kWarpN / kFrag; ++j) wmma::mma_sync(acc[i][j], a[i], b[j], acc[i][j]);
    }
    __syncthreads();
  }

  // Which thread holds which element of a fragment is unspecified, so each warp writes it out through shared memory.
#pragma unroll
  for (int i = 0; i < kWarpM / kFrag; ++i)
#pragma unroll
    for (int j = 0; j < kWarpN / kFrag; ++j) {
      wmma::store_matrix_sync(&c_tile[warp][0][0], acc[i][j], kFrag, wmma::mem_row_major);
      __syncwarp();
      for (int e = lane; e < kFrag * kFrag; e += 32) {
        const int row = row0 + warp_row + i * kFrag + e / kFrag, col = col0 + warp_col + j * kFrag + e % kFrag;
        if (row < g.m && col < g.n) {
          T* c = g.c + row * g.ldc + col;
          const float sum = c_tile[warp][e / kFrag][e % kFrag];
          *c = T(g.alpha * sum + (g.beta != 0.0f ? g.beta * float(*c) : 0.0f));
        }
      }
      __syncwarp();
    }
}

template <typename T>
void launch(const Gemm<T>& g) {
  const dim3 grid((g.n + kBlockN - 1) / kBlockN, (g.m + kBlockM - 1) / kBlockM);
  if (g.layout == Layout::TN)
    multiply<T, Layout::TN><<<grid, kThreads, 0, g.stream>>>(g);
  else
    multiply<T, Layout::NN><<<grid, kThreads, 0, g.stream>>>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v03_wmma, minfer::launch)
