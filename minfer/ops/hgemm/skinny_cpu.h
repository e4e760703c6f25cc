// A product with few rows of A on a CPU: no packing, each element of B is converted once for all rows of a tile. The sizes are
// template arguments, so that a file of its own has them as constants; 0: known only at run time.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "hgemm.h"
#include "ops/halves.h"

namespace minfer {

constexpr int kLanes = 16;  // floats that are added up side by side: a vector of AVX-512, several of narrower ones
#ifdef __AVX512F__
constexpr int kSums = 24;  // vectors of sums that a tile has: of 32 registers
#else
constexpr int kSums = 6;
#endif
constexpr int kMostRows = 6, kRowsOfAny = 4;  // of a tile

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Bits __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

// kLanes elements as floats; of halves as `widen` does it.
template <typename T>
[[gnu::always_inline]] inline Floats widen_lanes(const T* x) {
  const Words bits = __builtin_convertvector(*reinterpret_cast<const Bits*>(x), Words);
  if constexpr (std::is_same_v<T, BFloat16>) return (Floats)(bits << 16);
  const Words magnitude = (bits & 0x7fff) << 13;
  const Words scaled = (Words)((Floats)magnitude * 0x1p112f);
  const Words special = (Words)(magnitude >= 0x7c00u << 13) & 0x7f800000u;
  return (Floats)(scaled | special | (bits & 0x8000) << 16);
}

// kRows x kCols elements of C from row0 and col0 on, in TN: both operands are read along k.
template <int kRows, int kCols, int kK, typename T>
void dot_tile(const Gemm<T>& g, int row0, int col0) {
  const int depth = kK > 0 ? kK : g.k, whole = depth / kLanes * kLanes;
  const T* a = g.a + row0 * g.lda;
  const T* b = g.b + col0 * g.ldb;
  Floats sums[kRows][kCols] = {};
  for (int k = 0; k < whole; k += kLanes) {
    Floats wide[kCols];
#pragma GCC unroll 24
    for (int j = 0; j < kCols; ++j) wide[j] = widen_lanes(b + j * g.ldb + k);
#pragma GCC unroll 24
    for (int i = 0; i < kRows; ++i) {
      const Floats row = widen_lanes(a + i * g.lda + k);
#pragma GCC unroll 24
      for (int j = 0; j < kCols; ++j) sums[i][j] += row * wide[j];
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 24
    for (int j = 0; j < kCols; ++j) {
      float sum = 0.0f;
      for (int l = 0; l < kLanes; ++l) sum += sums[i][j][l];
      for (int k = whole; k < depth; ++k) sum += widen(a[i * g.lda + k]) * widen(b[j * g.ldb + k]);
      T& c = g.c[(row0 + i) * g.ldc + col0 + j];
      c = narrow<T>(g.alpha * sum + (g.beta != 0.0f ? g.beta * widen(c) : 0.0f));
    }
}

// All rows of kCols columns: kRows at a time; what is left of them in one tile where kLeft says how many, else in halves.
template <int kRows, int kCols, int kK, int kLeft, typename T>
void dot_columns(const Gemm<T>& g, int row0, int rows, int col0) {
  for (; rows >= kRows; rows -= kRows, row0 += kRows) dot_tile<kRows, kCols, kK>(g, row0, col0);
  if constexpr (kLeft > 0) dot_tile<kLeft, kCols, kK>(g, row0, col0);
  else if constexpr (kRows > 1) {
    if (rows > 0) dot_columns<kRows / 2, kCols, kK, 0>(g, row0, rows, col0);
  }
}

// kM and kK: the rows of A and its length, where they are constants. Rows are then shared evenly by as few tiles as hold them,
// and B is read once for each tile; otherwise a tile has up to kRowsOfAny.
template <int kM, int kK, typename T>
void launch_skinny(const Gemm<T>& g) {
  constexpr int kTiles = (kM + kMostRows - 1) / kMostRows;
  constexpr int kRows = kM > 0 ? (kM + kTiles - 1) / kTiles : kRowsOfAny;
  constexpr int kCols = std::clamp(kSums / kRows, 1, 6), kLeft = kM % kRows;
  const int groups = (g.n + kCols - 1) / kCols;
  const int64_t share = 1 + 65536 / (static_cast<int64_t>(g.k) * kRows * kCols + 1);  // of a task, at least
  torch::stable::parallel_for(0, groups, share, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int col = static_cast<int>(group) * kCols, rows = kM > 0 ? kM : g.m;
      if (col + kCols <= g.n) dot_columns<kRows, kCols, kK, kLeft>(g, 0, rows, col);
      else
        for (int j = col; j < g.n; ++j) dot_columns<kRows, 1, kK, kLeft>(g, 0, rows, j);
    }
  });
}

// Throws unless the sizes are those of the constants.
template <int kM, int kK, typename T>
void launch_constants(Gemm<T> g) {
  if (g.k == 1 || (g.n == 1 && g.ldb == 1)) g.layout = Layout::TN, g.ldb = 1;  // one row or column: stored either way
  STD_TORCH_CHECK(g.layout == Layout::TN, "hgemm: this kernel takes b stored as (N, K)");
  STD_TORCH_CHECK(kM == 0 || g.m == kM, "hgemm: this kernel takes m = ", kM, ", got ", g.m);
  STD_TORCH_CHECK(kK == 0 || g.k == kK, "hgemm: this kernel takes k = ", kK, ", got ", g.k);
  launch_skinny<kM, kK>(g);
}

}  // namespace minfer
