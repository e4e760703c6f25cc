// v12_fp8_fitted: hgemm's v18 for fp8, with promoted sums: tiles whose height fits the number of rows.
// Idea: v08's pairs of blocks have tiles of 256 x 256, so that 300 rows become 512. v18's tiles have nearly any height, and a
// block copies the next tile's operands while it stores a tile. The sums of the 128 products of a step go to registers of their
// own, from where they are added in fp32. Where registers suffice, there are two sets of these, so that the tensor cores
// already multiply the next step while a thread adds. Else the other warpgroups' products run meanwhile; tiles of 192 columns
// have three warpgroups. Scales are copied to shared memory while a tile is multiplied.
// Expected (H200): 1.2 times v08 from 129 rows on, less where there are thousands.
// Measured (H200, bfloat16, fp8_fp8, promoted, m=n=k=8192): 1455 TFLOP/s cold.
#include "cuda/gemm/fitted_launch.cuh"
#include "cuda/gemm/fp8_tiles.h"
#include "fp8_wgmma.cuh"

namespace minfer {

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  const Scaled<T> g = make_scaled(p);
  constexpr Layout kLayout = Layout::TN;
  using Finish = ScaleOfColumns;
  const auto at_once = fitted_at_once<Fitted<E4M3Pair, kLayout, 128, 128, false, false, 2, T>, Finish, Scaled<T>>();
  const FittedChoice choice = remembered_choice(kFp8Tiles, g.m, g.n, g.k, true, at_once, kModelOfFp8);
  MINFER_FP8_TILES(MINFER_LAUNCH_IF)
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v12_fp8_fitted, false, true, minfer::launch)
