// v07_strips: hgemm's v17 with bias and ReLU, for up to 128 rows.
// Idea: with few rows a product takes the time in which B comes from memory. A block has all rows of A and as many columns of
// B as make one wave of blocks; v03 has tiles of 64 or 128 rows and at most 128 columns, so that a wide B takes several waves.
// Expected (H100): the time of hgemm's v17.
#include "gemm_bias_relu.h"
#include "cuda/gemm/biased_strips.cuh"

namespace minfer {

template <typename T>
void launch(const Biased<T>& g) {
  require_rows(g);
  launch_few_rows(Activated<T, Relu>{g, {}});
}

}  // namespace minfer

MINFER_GEMM_BIAS_RELU(gemm_bias_relu_v07_strips, minfer::launch)
