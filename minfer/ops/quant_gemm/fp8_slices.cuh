// What the fp8 kernels for up to 128 rows of x share: the scales of a block's N-slice.
#pragma once

#include "cuda/gemm/one_wave.cuh"
#include "fp8_wgmma.cuh"

namespace minfer {

template <typename Tile, typename Out>
struct Epilogue<Tile, Scaled<Out>> {
  static constexpr int kCols = Tile::kRegisters * 2;
  static constexpr bool kAhead = kCols <= 112;  // scales of more columns do not fit in registers beside the sums
  float2 columns[kAhead ? kCols / 8 : 1];

  __device__ Epilogue(const Scaled<Out>& g, int col0) {
    if constexpr (kAhead)
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j) columns[j] = column(g, col0, j);
  }
  __device__ void operator()(Tile& tile, const Scaled<Out>& g, int row0, int col0) const {
    scale_tile<kCols>(tile.sums[0], g, row0, [&](int j) { return kAhead ? columns[j] : column(g, col0, j); });
  }
  __device__ static float2 column(const Scaled<Out>& g, int col0, int j) {
    const int col = col0 + j * 8 + threadIdx.x % 4 * 2;  //@ col_of_slice
    return col < g.n ? *reinterpret_cast<const float2*>(g.w_scales + col) : float2{};
  }
};

}  // namespace minfer
