// What the fp8 kernels for Hopper share: tensor maps of their operands, and the scales of a tile.
#pragma once

#include "cuda/gemm/warpgroup_tile.cuh"
#include "fp8.cuh"

namespace minfer {

// As hgemm's make_maps, with y in place of c.
template <typename Out>
Maps make_maps(const Scaled<Out>& g, int box_m, int box_n, int box_c = 64) {
  check_pieces(g.w_scales, 2, 2, "quant_gemm: scales", 8);
  Maps maps;
  STD_TORCH_CHECK(make_tensor_map(maps.a, g.a, g.m, g.k, g.lda, box_m, kBlockK) &&
                      make_tensor_map(maps.b, g.b, g.n, g.k, g.ldb, box_n, kBlockK) &&
                      make_tensor_map(maps.c, g.y, g.m, g.n, g.ldc, 16, box_c),
                  "quant_gemm: the driver knows no tensor map for x, w or y; it must be one of CUDA 12 or newer");
  return maps;
}

// Multiplies a thread's sums of 64 rows from row0 on by the scales of their rows and columns. A thread has two neighbouring
// columns of every eight, in two rows; column(j) returns the scales of its two in the eight number j.
template <int kCols, typename Out, typename Column>
__device__ void scale_tile(float* sums, const Scaled<Out>& g, int row0, Column column) {
  const int first = row0 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  //@ lower_scale
  const float upper = first < g.m ? g.x_scales[first] : 0.0f, lower = first + 8 < g.m ? g.x_scales[first + 8] : 0.0f;
#pragma unroll
  for (int j = 0; j < kCols / 8; ++j) {
    const float2 scale = column(j);
    sums[j * 4] *= scale.x * upper, sums[j * 4 + 1] *= scale.y * upper;
    sums[j * 4 + 2] *= scale.x * lower, sums[j * 4 + 3] *= scale.y * lower;
  }
}

}  // namespace minfer
