// Stores tiles with ordinary stores, for hgemm's v18_fitted: TMA cannot store rows that do not start at multiples of 16 bytes,
// as with n = 49155.
#pragma once

#include "cuda/gemm/warpgroup_tile.cuh"

namespace minfer {

constexpr int kBoxRows = 32, kBox = kBoxRows * 64;  // what a warpgroup stores at once, in rows of 64 columns of the product

// A warpgroup stores a box. Its rows may start anywhere in memory. Each warp stores one row at a time, and each lane
// two columns of it, at a multiple of 4 bytes.
template <typename T>
__device__ inline void store_anywhere(const Gemm<T>& g, const T* box, int row, int col) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, columns = min(64, g.n - col);
#pragma unroll 1
  for (int i = warp; i < kBoxRows && row + i < g.m; i += 4) {
    T* to = g.c + (row + i) * g.ldc + col;
    const T* from = box + i * 64 + (lane / 4 ^ i % 8) * 8 + lane % 4 * 2;
    const uint32_t two = *reinterpret_cast<const uint32_t*>(from), next = __shfl_down_sync(~0u, two, 1);
    const int odd = reinterpret_cast<uintptr_t>(to) / 2 % 2, at = 2 * lane + odd;  //@ odd_row
    const uint32_t pair = odd ? two >> 16 | next << 16 : two;
    if (at + 1 < columns)
      *reinterpret_cast<uint32_t*>(to + at) = pair;
    else if (at < columns)
      memcpy(to + at, &pair, sizeof(T));
    if (odd && lane == 0 && columns > 0) *to = *from;
  }
}

}  // namespace minfer
