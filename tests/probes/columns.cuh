// Reads the columns of a tile in shared memory: a warp's 32 loads fall into one bank, unless the rows are padded.
#pragma once

#include "ops/hgemm/hgemm.h"

namespace probe {

constexpr int kLoads = 32;  // of each warp, in 32 blocks of one warp

template <int kPadding, typename T>
__global__ void __launch_bounds__(32) columns(minfer::Gemm<T> g) {
  __shared__ float tile[32][32 + kPadding];
  const int lane = threadIdx.x;
  for (int row = 0; row < 32; ++row) tile[row][lane] = float(g.a[row * 32 + lane]);
  __syncwarp();
  float sum = 0.0f;
#pragma unroll
  for (int column = 0; column < kLoads; ++column) sum += *const_cast<volatile float*>(&tile[lane][column]);
  g.c[blockIdx.x * 32 + lane] = T(sum);
}

template <int kPadding, typename T>
void launch_columns(const minfer::Gemm<T>& g) {
  columns<kPadding><<<32, 32, 0, g.stream>>>(g);
}

}  // namespace probe
