// v05_fitted: gemm_bias_relu's v05 with GELU: tiles whose height fits M, from 129 rows on.
// Idea: at 275 rows v03's pairs of tiles compute 512. hgemm's v18 has tiles of nearly any height, and divides k where tiles are
// few. GELU runs before a tile is stored, and the tensor cores wait for it.
// Expected (H100): the speed of gemm_bias_relu's v05 less 3 %, up to some thousand rows; beyond, v03 is faster, whose GELU runs
// under the other warpgroup's products.
// Measured (H200, float16, TN, m=n=k=8192): 741.0 TFLOP/s cold; 101.1 % of torch.
#include "gemm_bias_gelu.h"
#include "cuda/gemm/biased_columns.cuh"

namespace minfer {

template <typename T>
void launch(const Biased<T>& g, Gelu gelu) {
  launch_fitting_biased(g, gelu);
}

}  // namespace minfer

MINFER_GEMM_BIAS_GELU(gemm_bias_gelu_v05_fitted, minfer::launch)
