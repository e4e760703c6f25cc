// v02's kernel with B's tile as it lies in TN, [n][k], so that the threads of a warp read down a column of it: v02a, v02b
// and v02c differ in where they put an element, and in nothing else.
#pragma once

#include "hgemm.h"

namespace minfer {

constexpr int kTile = 32;

template <typename Place, typename T>
__global__ void __launch_bounds__(kTile* kTile) banks(Gemm<T> g) {
  __shared__ float a_tile[kTile][kTile];  // [m][k]
  __shared__ float b_tile[kTile * Place::kStride];
  // One element at a time in all three: where rows are multiples of 16 bytes, the compiler would read four of k at once.
  const volatile float* b_read = b_tile;

  const int x = threadIdx.x, y = threadIdx.y;
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  float sum = 0.0f;
  for (int k0 = 0; k0 < g.k; k0 += kTile) {
    const bool a_inside = row0 + y < g.m && k0 + x < g.k;
    a_tile[y][x] = a_inside ? float(g.a[(row0 + y) * g.lda + k0 + x]) : 0.0f;
    if (g.layout == Layout::TN) {
      const bool b_inside = col0 + y < g.n && k0 + x < g.k;
      b_tile[Place::at(y, x)] = b_inside ? float(g.b[(col0 + y) * g.ldb + k0 + x]) : 0.0f;
    } else {
      const bool b_inside = k0 + y < g.k && col0 + x < g.n;
      b_tile[Place::at(x, y)] = b_inside ? float(g.b[(k0 + y) * g.ldb + col0 + x]) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTile; ++k) sum += a_tile[y][k] * b_read[Place::at(x, k)];
    __syncthreads();
  }

  if (row0 + y >= g.m || col0 + x >= g.n) return;
  T* c = g.c + (row0 + y) * g.ldc + col0 + x;
  *c = T(g.alpha * sum + (g.beta != 0.0f ? g.beta * float(*c) : 0.0f));
}

template <typename Place, typename T>
void launch_banks(const Gemm<T>& g) {
  const dim3 grid((g.n + kTile - 1) / kTile, (g.m + kTile - 1) / kTile);
  banks<Place><<<grid, dim3(kTile, kTile), 0, g.stream>>>(g);
}

}  // namespace minfer
