// For hgemm's v18_fitted where rows of the product, and in NN those of B, do not start at multiples of 16 bytes, as with a
// vocabulary of 49155. TMA cannot copy or store such rows.
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

// A warp copies 16 of a stage's rows of B, which may start anywhere, in words of two columns at multiples of 4 bytes.
template <typename Of, typename T = typename Of::T>
__device__ inline void copy_plain(const Gemm<T>& g, T* stage, int col, int k) {
  constexpr int kRows = 16, kSlabs = Of::kN / 64;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * kRows;
  const T* base = g.b + (k + row) * g.ldb + col;
  uint32_t words[kSlabs][kRows], last[kSlabs][kRows];  // lane 31 also loads the element behind its word
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const T* from = base + i * g.ldb + slab * 64;
      const int odd = reinterpret_cast<uintptr_t>(from) / 2 % 2, at = col + slab * 64 + 2 * lane - odd;  // its column
      const T* word = from + 2 * lane - odd;
      // A word may contain an element of a neighbouring row, but none beyond the last row. There are no branches, so
      // that all loads are in flight together.
      const int left = g.k - (k + row + i);
      const bool whole = left > 1 || left == 1 && at + 1 < g.n, half = left == 1 && at + 1 == g.n;
      const bool more = lane == 31 && odd && left > 0 && at + 2 < g.n;
      words[slab][i] = whole && at < g.n ? *reinterpret_cast<const uint32_t*>(word) : 0;
      last[slab][i] = half || more ? *reinterpret_cast<const uint16_t*>(half ? word : word + 2) : 0;
      if (half) words[slab][i] = last[slab][i];
    }
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t after = __shfl_down_sync(~0u, words[slab][i], 1), next = lane == 31 ? last[slab][i] : after;
      const bool odd = reinterpret_cast<uintptr_t>(base + i * g.ldb) / 2 % 2;
      T* to = stage + slab * kSlab + (row + i) * 64 + (lane / 4 ^ i % 8) * 8 + lane % 4 * 2;  //@ place_of_word
      *reinterpret_cast<uint32_t*>(to) = odd ? words[slab][i] >> 16 | next << 16 : words[slab][i];
    }
}

}  // namespace minfer
