// v12_fp8_even_tiles: v11's tiles for 129 rows of x and more, all of one height.
// Idea: v08's pairs of blocks have tiles of 256 x 256, which for 300 rows of x means 512 rows, and with 4096 columns 32 tiles for
// 66 pairs. v11 has tiles of at most 128 rows and of 64 columns or more. The rows are divided evenly among as few tiles as
// possible, because TMA takes longer for rows outside of the matrix. A model chooses the width, and whether two blocks below each
// other share their copies of W (cuda/gemm/fp8_choice.h).
// Expected (H200): 1.2 times scaled_mm from 129 to 256 rows, where v08 has 0.82; 1.08 up to 1100 rows, where v08 has 0.88. With
// more rows v08 is faster, because its blocks do not end after each tile.
// Measured (H200, bfloat16, fp8_fp8, promoted, m=n=k=8192): 1259 TFLOP/s cold.
#include "cuda/gemm/fp8_choice.h"
#include "fp8_slices.cuh"

namespace minfer {

template <typename Out, int kN, int kSharing>
using EvenTile = Even<Shape<E4M3Pair, Layout::TN, kFp8Rows, kN, 2, kSharing, 1, false, Out, true>>;

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  const Scaled<T> g = make_scaled(p);
  Fp8Tile tile = choose_fp8_tile(p.m, p.n, p.k, multiprocessors());
  if (tile.cols == 0) tile = {192, 2};  // more waves than the model knows
#define MINFER_LAUNCH_IF(COLS, SHARING) \
  if (tile.cols == COLS && tile.sharing == SHARING) return launch_shape<EvenTile<T, COLS, SHARING>>(g);
  MINFER_FP8_TILES(MINFER_LAUNCH_IF)
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v12_fp8_even_tiles, false, true, minfer::launch)
