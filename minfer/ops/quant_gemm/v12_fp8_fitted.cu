// v12_fp8_fitted: hgemm's v18 for fp8, with promoted sums: tiles whose height fits the number of rows.
// Idea: v08's pairs of blocks have tiles of 256 x 256, so that 300 rows become 512. v18's tiles have nearly any height, and a
// block copies the next tile's operands while it stores a tile. The tensor cores write the sums of a step's 128 products, for
// 64 columns, to a buffer in registers, from where threads add them in fp32. Where two buffers fit, the tensor cores fill one
// while threads add the other. Elsewhere other warpgroups multiply while one adds; tiles of 192 columns and up to 128 rows have
// three warpgroups for that. Scales are copied to shared memory while a tile is multiplied.
// Expected (H200): 1.2 times v08 from 129 rows on, less where there are thousands.
// Measured (H200, bfloat16, fp8_fp8, promoted, m=n=k=8192): 1455 TFLOP/s cold.
#include "cuda/gemm/fitted_launch.cuh"
#include "cuda/gemm/fp8_tiles.h"
#include "fp8.cuh"

namespace minfer {

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  const Scaled<T> g = make_scaled(p);
  constexpr Layout kLayout = Layout::TN;
  using Finish = ScaleOfColumns;
  const auto at_once = fitted_at_once<Fitted<Scaled<T>, kLayout, 128, 128>, Finish>();
  const FittedChoice choice = remembered_choice(kFp8Tiles, g.m, g.n, g.k, true, at_once, kModelOfFp8);
  MINFER_FP8_TILES(MINFER_LAUNCH_IF)
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v12_fp8_fitted, false, true, minfer::launch)
