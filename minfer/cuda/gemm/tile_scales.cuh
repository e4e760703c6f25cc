// The scales of the rows and columns of a product with fp8, on their way to the warpgroup that multiplies a tile.
#pragma once

#include "cuda/mma.cuh"

namespace minfer {

// Scales of kRows rows and kColumns columns, in shared memory of one warpgroup. A cold read of them would take a microsecond,
// so they are copied while the warpgroup multiplies.
template <int kRows, int kColumns>
struct TileScales {
  alignas(8) float of_row[kRows];
  float of_column[kColumns];

  // Starts to copy the scales from `row` and `col` on, with 0 for those beyond the product. All threads of the warpgroup call
  // it. Each waits for its own copies (cp_async_wait), and a barrier follows before any reads them. of_column follows of_row in
  // memory, so one index serves both.
  template <typename Problem>
  __device__ void fetch(const Problem& g, int row, int col) {
    for (int i = threadIdx.x % 128; i < kRows + kColumns; i += 128) {
      const bool is_row = i < kRows;
      const int at = is_row ? row + i : col + i - kRows, count = is_row ? g.m : g.n;
      cp_async_few<4>(of_row + i, (is_row ? g.x_scales : g.w_scales) + min(at, count - 1), at < count);
    }
    cp_async_commit();
  }
};

// A Finish of fitted.cuh: multiplies a thread's sums by the scales of its two columns, which are eight apart.
struct ScaleOfColumns {
  float scales[2];

  __device__ explicit ScaleOfColumns(const float* of_column) : scales{of_column[0], of_column[8]} {}
  __device__ float operator()(float sum, bool second) const { return sum * scales[second]; }
};

}  // namespace minfer
