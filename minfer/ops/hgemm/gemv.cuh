// A product with up to 8 rows of A. Each lane loads its fragments of B for mma.sync from memory into registers, without shared
// memory. The sizes are arguments of the launch or constants of the build.
#pragma once

#include "cuda/gemm/warp_tile.cuh"
#include "hgemm.h"

namespace minfer {

constexpr int kMostM = 8, kLeastWarps = 4, kMostWarps = 16;
// A block's warps split k. From kLeastWarps on, the launch doubles their number only if an SM then gets at most this many.
constexpr int kWarpsPerSM = 24;

// What a lane, g = lane / 4 and t = lane % 4, reads of B for kK steps in k of kCols columns, and of A beside it.
template <typename T, Layout kLayout>
struct Step;

// Columns g and g + 8, of which each is contiguous in k; four lanes read 64 bytes of one.
template <typename T>
struct Step<T, Layout::TN> {
  static constexpr int kCols = 16, kK = 32, kUnrolled = 4;
  uint4 b[2], a;

  __device__ void load(const Gemm<T>& g, int col0, int k0) {
    const int lane = threadIdx.x % 32, k = k0 + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int col = col0 + lane / 4 + 8 * i;
      b[i] = k < g.k && col < g.n ? __ldcs(reinterpret_cast<const uint4*>(g.b + col * g.ldb + k)) : uint4{};
    }
    a = k < g.k && lane / 4 < g.m ? *reinterpret_cast<const uint4*>(g.a + lane / 4 * g.lda + k) : uint4{};  //@ row_of_a8
  }

  __device__ void multiply(float (&sums)[1][4]) const {
    mma_m16n8k16<T>(sums[0], {b[0].x, b[1].x, b[0].y, b[1].y}, {a.x, a.y});
    mma_m16n8k16<T>(sums[0], {b[0].z, b[1].z, b[0].w, b[1].w}, {a.z, a.w});
  }

  // The column of a lane's sums 0 and 1 (upper = 0), or 2 and 3, of a product.
  __device__ static int column(int, int upper) { return threadIdx.x % 32 / 4 + 8 * upper; }
};

// Columns 8 g to 8 g + 7 of four rows of B; eight lanes read 128 bytes of one. Product j takes columns 8 g + 2 j and one
// more, of which two rows' elements have to be brought into one register.
template <typename T>
struct Step<T, Layout::NN> {
  static constexpr int kCols = 64, kK = 16, kUnrolled = 2;
  uint32_t b[4][4];  // [k][two columns]
  uint2 a;

  __device__ void load(const Gemm<T>& g, int col0, int k0) {
    const int lane = threadIdx.x % 32, k = k0 + lane % 4 * 4, col = col0 + lane / 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool inside = k < g.k && col < g.n;
      const uint4 row = inside ? __ldcs(reinterpret_cast<const uint4*>(g.b + (k + i) * g.ldb + col)) : uint4{};
      b[i][0] = row.x, b[i][1] = row.y, b[i][2] = row.z, b[i][3] = row.w;
    }
    a = k < g.k && lane / 4 < g.m ? *reinterpret_cast<const uint2*>(g.a + lane / 4 * g.lda + k) : uint2{};  //@ row_of_a4
  }

  __device__ void multiply(float (&sums)[4][4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto low = [&](int i) { return __byte_perm(b[i][j], b[i + 1][j], 0x5410); };
      const auto high = [&](int i) { return __byte_perm(b[i][j], b[i + 1][j], 0x7632); };
      mma_m16n8k16<T>(sums[j], {low(0), high(0), low(2), high(2)}, {a.x, a.y});
    }
  }

  __device__ static int column(int product, int upper) { return threadIdx.x % 32 / 4 * 8 + 2 * product + upper; }  //@ column
};

// kM, kN, kK and kWarps: the sizes and the warps of a block where they are constants; 0: known only at run time.
template <typename T, Layout kLayout, int kM, int kN, int kK, int kWarps>
__global__ void __launch_bounds__(32 * (kWarps > 0 ? kWarps : kMostWarps), 1) gemv(Gemm<T> g) {
  using Stream = Step<T, kLayout>;
  if constexpr (kM > 0) g.m = kM, g.n = kN, g.k = kK;
  constexpr int kCols = Stream::kCols, kUnrolled = Stream::kUnrolled;
  __shared__ float parts[kMostWarps][kMostM][kCols];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = kWarps > 0 ? kWarps : blockDim.x / 32;
  const int col0 = blockIdx.x * kCols;
  float sums[kCols / 16][4] = {};
  for (int k0 = warp * kUnrolled * Stream::kK; k0 < g.k; k0 += warps * kUnrolled * Stream::kK) {
    Stream steps[kUnrolled];
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) steps[i].load(g, col0, k0 + i * Stream::kK);  // all before the first is used
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) steps[i].multiply(sums);
  }

#pragma unroll
  for (int product = 0; product < kCols / 16; ++product)
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[warp][lane % 4 * 2 + i % 2][Stream::column(product, i / 2)] = sums[product][i];
  __syncthreads();  //@ sums_there
  for (int i = threadIdx.x; i < g.m * kCols; i += blockDim.x) {
    const int row = i / kCols, col = i % kCols;
    if (col0 + col >= g.n) continue;
    float sum = 0.0f;
    for (int w = 0; w < warps; ++w) sum += parts[w][row][col];
    T* c = g.c + row * g.ldc + col0 + col;
    *c = T(g.alpha * sum + (g.beta != 0.0f ? g.beta * float(*c) : 0.0f));
  }
}

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  using Stream = Step<T, kLayout>;
  const int blocks = (g.n + Stream::kCols - 1) / Stream::kCols;
  const int batches = (g.k + Stream::kUnrolled * Stream::kK - 1) / (Stream::kUnrolled * Stream::kK);
  int warps = 1;
  while (2 * warps <= min(kMostWarps, batches) &&
         (warps < kLeastWarps || int64_t(2) * warps * blocks <= kWarpsPerSM * multiprocessors()))
    warps *= 2;
  gemv<T, kLayout, 0, 0, 0, 0><<<blocks, 32 * warps, 0, g.stream>>>(g);
}

// For the sizes of the constants alone, B in TN.
template <int kM, int kN, int kK, int kWarps, typename T>
void launch_constants(const Gemm<T>& g) {
  static_assert(kM >= 1 && kM <= kMostM && kWarps >= 1 && kWarps <= kMostWarps);
  require_vectors<T, float>(g);
  STD_TORCH_CHECK(g.layout == Layout::TN, "hgemm: this kernel takes b stored as (N, K)");
  STD_TORCH_CHECK(g.m == kM && g.n == kN && g.k == kK, "hgemm: this kernel takes m, n, k = ", kM, ", ", kN, ", ", kK,
                  ", got ", g.m, ", ", g.n, ", ", g.k);
  constexpr int kCols = Step<T, Layout::TN>::kCols;
  gemv<T, Layout::TN, kM, kN, kK, kWarps><<<(kN + kCols - 1) / kCols, 32 * kWarps, 0, g.stream>>>(g);
}

}  // namespace minfer
