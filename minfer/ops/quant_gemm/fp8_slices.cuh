// What the fp8 kernels with N-slices of W share: their launch for up to 128 rows of x, and the scales of a block's columns.
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

template <typename Out, int kM, int kN, bool kPromoted, int kPerSM = 1>
using Slice = Shape<E4M3Pair, Layout::TN, kM, kN, kM / 64, 1, kPerSM, false, Out, kPromoted>;

// The narrowest N-slices that all run at once. If not even the widest do, these run in several waves. With promoted sums and 128
// rows, two warpgroups have no registers for 224 columns.
template <bool kPromoted, int kM, typename Out>
void launch_rows(const Scaled<Out>& g) {
  if (one_wave(g, kM, 32)) return launch_shape<Slice<Out, kM, 32, kPromoted>>(g);
  if (one_wave(g, kM, 64)) return launch_shape<Slice<Out, kM, 64, kPromoted>>(g);
  if (one_wave(g, kM, 112)) return launch_shape<Slice<Out, kM, 112, kPromoted>>(g);
  if constexpr (kPromoted)
    launch_shape<Slice<Out, kM, kM == 64 ? 224 : 192, kPromoted>>(g);
  else
    launch_shape<Slice<Out, kM, kM == 64 ? 112 : 224, kPromoted, kM == 64 ? 2 : 1>>(g);
}

template <bool kPromoted, typename F, typename T>
void launch_slices(const Product<F, T>& p) {
  STD_TORCH_CHECK(p.m <= 128, "quant_gemm: this kernel takes m up to 128, got ", p.m);
  const Scaled<T> g = make_scaled(p);
  g.m <= 64 ? launch_rows<kPromoted, 64>(g) : launch_rows<kPromoted, 128>(g);
}

}  // namespace minfer
