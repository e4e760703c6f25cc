// cpu_blocked: cache blocking, operands packed as float32, a 6x16 register tile of vector multiply-adds.
// Idea: each half is converted once a panel instead of once a multiply-add; panels stay in the L1 and L2 caches, and
// twelve 8-wide accumulators hide the multiply-add latency. The loop order is Goto and van de Geijn's (ACM TOMS 2008).
// Expected: 20x or more over cpu_naive, near the core's vector peak.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "hgemm.h"

namespace minfer {

constexpr int kRows = 6, kCols = 16;     // register tile: 6 x 2 vectors of 8 floats leave 4 of 16 registers for operands
constexpr int kDepth = 256;              // panel depth: a 16-column strip of B is 16 KB and stays in L1
constexpr int kPanelM = 96, kPanelN = 512;  // A panel 96 KB in L2, B panel 512 KB in the share of L3

typedef float Vec __attribute__((vector_size(32), aligned(4)));

// acc[i][:] += sum over d of a[d][i] * b[d][:], both packed, into sums of kRows x kCols floats.
void multiply_tile(const float* a, const float* b, int depth, float* sums) {
  Vec acc[kRows][2] = {};
  for (int d = 0; d < depth; ++d, a += kRows, b += kCols) {
    const Vec b0 = *reinterpret_cast<const Vec*>(b), b1 = *reinterpret_cast<const Vec*>(b + 8);
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) {
      acc[i][0] += a[i] * b0;
      acc[i][1] += a[i] * b1;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    *reinterpret_cast<Vec*>(sums + i * kCols) += acc[i][0];
    *reinterpret_cast<Vec*>(sums + i * kCols + 8) += acc[i][1];
  }
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

// One kPanelM x kPanelN block of C; the float32 sums live in a buffer until K is exhausted, then are rounded once.
template <typename T>
void multiply_block(const Gemm<T>& g, int row0, int col0) {
  const int rows = std::min(kPanelM, g.m - row0), cols = std::min(kPanelN, g.n - col0);
  const int row_tiles = (rows + kRows - 1) / kRows, col_tiles = (cols + kCols - 1) / kCols;
  const int64_t k_stride = g.layout == Layout::TN ? 1 : g.ldb, n_stride = g.layout == Layout::TN ? g.ldb : 1;
  static thread_local std::vector<float> a_panel(kPanelM * kDepth), b_panel(kPanelN * kDepth), sums(kPanelM * kPanelN);
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

}  // namespace minfer

MINFER_HGEMM(hgemm_cpu_blocked, minfer::launch)
