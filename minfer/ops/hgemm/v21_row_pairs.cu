// v21_row_pairs: 129 to 1024 rows of A: v17 with two to eight tiles of rows. If they are even, pairs share an N-slice of B.
// Idea: v18's tiles have 64 columns of B or a multiple of these. With two tiles of rows, 5120 columns are 80 blocks of 128
// columns, which leave 52 of 132 SMs idle, or 160 of 64, which are more than one wave. Here the rows of A are the rows of
// wgmma, and an N-slice has 64 columns or more, up to 256: 64 N-slices of 80 columns are 128 blocks. All tiles have one height:
// TMA takes longer for rows outside of A. If their number is even, two blocks below each other are a cluster, and each copies
// half of the N-slice to both.
// Expected (H200, 248 x 5120 x 3072): 21 us, where v18, before it had its present tiles, took 24.5, and cuBLAS 20.3. The gain
// is smaller where the tiles have few rows, because wgmma still multiplies 128 of each.
// Measured (H200, bfloat16, TN, float32, m=256, n=28672, k=4096): 613.4 TFLOP/s cold; 97.8 % of torch.
#include "cuda/gemm/one_wave.cuh"
#include "hgemm.h"

namespace minfer {

constexpr int kRows = 128;  // of a tile at most

template <typename T, Layout kLayout, int kN, int kCluster>
using RowTile = Even<Shape<T, kLayout, kRows, kN, 2, kCluster>>;

// The narrowest N-slices that all run at once; if none do, the widest, in several waves.
template <Layout kLayout, int kN, int... kWider, typename T>
void launch_narrowest(const Gemm<T>& g) {
  if constexpr (sizeof...(kWider) > 0)
    if (!one_wave(g, kRows, kN)) return launch_narrowest<kLayout, kWider...>(g);
  ceil_div(g.m, kRows) % 2 == 0 ? launch_shape<RowTile<T, kLayout, kN, 2>>(g) : launch_shape<RowTile<T, kLayout, kN, 1>>(g);
}

template <typename T>
void launch(const Gemm<T>& g) {
  STD_TORCH_CHECK(g.m <= 1024, "hgemm: this kernel takes m up to 1024, got ", g.m);
  if (g.layout == Layout::TN)
    launch_narrowest<Layout::TN, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256>(g);
  else  // a copy brings 64 columns
    launch_narrowest<Layout::NN, 64, 128, 256>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v21_row_pairs, minfer::launch)
