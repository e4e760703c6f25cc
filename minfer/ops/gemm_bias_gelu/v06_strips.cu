// v06_strips: hgemm's v17 with bias and GELU, for up to 128 rows.
// Idea: with few rows a product takes the time in which B comes from memory. A block has all rows of A and as many columns of
// B as make one wave of blocks; v02 has tiles of 64 or 128 rows and at most 128 columns, so that a wide B takes several waves.
// Expected (H100): the time of hgemm's v17, because a thread has at most 128 sums to apply GELU to.
#include "gemm_bias_gelu.h"
#include "cuda/gemm/biased_strips.cuh"

namespace minfer {

template <typename T>
void launch(const Biased<T>& g, Gelu gelu) {
  require_rows(g);
  launch_few_rows(Activated<T, Gelu>{g, gelu});
}

}  // namespace minfer

MINFER_GEMM_BIAS_GELU(gemm_bias_gelu_v06_strips, minfer::launch)
