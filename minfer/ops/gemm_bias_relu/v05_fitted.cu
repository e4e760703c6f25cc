// v05_fitted: hgemm's v18 with bias and ReLU on the sums of a tile, before they are stored.
// Idea: for 129 to 2048 rows, many rows of v04's 256-row tiles lie outside of the product, or many SMs get no tile. v18's tiles
// have nearly any height. As v18 swaps the operands, a thread's sums lie in two of each 64 columns, so it loads two biases.
// Expected: the speed of hgemm's v18 less 1 % (H100).
// Measured (H200, float16, TN, m=n=k=8192): 743.5 TFLOP/s cold; 102.1 % of torch.
#include "gemm_bias_relu.h"
#include "cuda/gemm/biased_columns.cuh"

namespace minfer {

template <typename T>
void launch(const Biased<T>& g) {
  launch_fitting_biased(g, Relu{});
}

}  // namespace minfer

MINFER_GEMM_BIAS_RELU(gemm_bias_relu_v05_fitted, minfer::launch)
