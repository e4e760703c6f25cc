// tiles: a product of blocks that are packed as float32, with a register tile of kRows rows of kVectors vectors.
// Idea: examples/generate_kernels.py changes the constants. Which tile fits into the registers, and which panels into the
// caches, depends on the processor.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "hgemm.h"

namespace minfer {
namespace {  // so that two kernels of this template in one process share nothing

constexpr int kWidth = 8;                   // floats of a vector
constexpr int kVectors = 2, kRows = 4;      // of a register tile
constexpr int kDepth = 256;                 // of a panel
constexpr int kPanelM = 64, kPanelN = 512;  // rows of A and columns of B in their panels

constexpr int kCols = kWidth * kVectors;
typedef float Vec __attribute__((vector_size(4 * kWidth), aligned(4)));

constexpr int round_up(int count, int step) { return (count + step - 1) / step * step; }

// sums[i][:] += a[d][i] * b[d][:] over d. Both are packed.
void multiply_tile(const float* a, const float* b, int depth, float* sums) {
  Vec acc[kRows][kVectors] = {};
  for (int d = 0; d < depth; ++d, a += kRows, b += kCols)
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) acc[i][j] += a[i] * *reinterpret_cast<const Vec*>(b + j * kWidth);
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j) *reinterpret_cast<Vec*>(sums + i * kCols + j * kWidth) += acc[i][j];
}

// Packs `count` lines of `depth` elements into strips of kStrip lines, [strip][d][line], filled up with zeros.
template <int kStrip, typename T>
void pack(float* packed, const T* source, int64_t line_stride, int64_t depth_stride, int count, int depth) {
  for (int line0 = 0; line0 < count; line0 += kStrip, packed += kStrip * depth)
    for (int line = 0; line < kStrip; ++line) {
      const T* from = source + (line0 + line) * line_stride;
      const bool inside = line0 + line < count;
      for (int d = 0; d < depth; ++d) packed[d * kStrip + line] = inside ? static_cast<float>(from[d * depth_stride]) : 0.0f;
    }
}

// One kPanelM x kPanelN block of C. Its sums stay in a buffer until all parts of K are added.
template <typename T>
void multiply_block(const Gemm<T>& g, int row0, int col0) {
  constexpr int kMostRows = round_up(kPanelM, kRows), kMostCols = round_up(kPanelN, kCols);
  const int rows = std::min(kPanelM, g.m - row0), cols = std::min(kPanelN, g.n - col0);
  const int row_tiles = (rows + kRows - 1) / kRows, col_tiles = (cols + kCols - 1) / kCols;
  const int64_t k_stride = g.layout == Layout::TN ? 1 : g.ldb, n_stride = g.layout == Layout::TN ? g.ldb : 1;
  static thread_local std::vector<float> a_panel(kMostRows * kDepth), b_panel(kMostCols * kDepth), sums(kMostRows * kMostCols);
  std::fill_n(sums.begin(), row_tiles * col_tiles * kRows * kCols, 0.0f);
  for (int k0 = 0; k0 < g.k; k0 += kDepth) {
    const int depth = std::min(kDepth, g.k - k0);
    pack<kRows>(a_panel.data(), g.a + row0 * g.lda + k0, g.lda, 1, rows, depth);
    pack<kCols>(b_panel.data(), g.b + col0 * n_stride + k0 * k_stride, n_stride, k_stride, cols, depth);
    for (int j = 0; j < col_tiles; ++j)
      for (int i = 0; i < row_tiles; ++i)
        multiply_tile(&a_panel[i * kRows * depth], &b_panel[j * kCols * depth], depth,
                      &sums[(i * col_tiles + j) * kRows * kCols]);
  }
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < cols; ++j) {
      const int tile = i / kRows * col_tiles + j / kCols;
      const float sum = sums[(tile * kRows + i % kRows) * kCols + j % kCols];
      T& c = g.c[(row0 + i) * g.ldc + col0 + j];
      c = static_cast<T>(g.alpha * sum + (g.beta != 0.0f ? g.beta * static_cast<float>(c) : 0.0f));
    }
}

template <typename T>
void launch(const Gemm<T>& g) {
  const int blocks_m = (g.m + kPanelM - 1) / kPanelM, blocks_n = (g.n + kPanelN - 1) / kPanelN;
  torch::stable::parallel_for(0, int64_t(blocks_m) * blocks_n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      multiply_block(g, int(block % blocks_m) * kPanelM, int(block / blocks_m) * kPanelN);
  });
}

}  // namespace
}  // namespace minfer

MINFER_HGEMM(hgemm_tiles, minfer::launch)
