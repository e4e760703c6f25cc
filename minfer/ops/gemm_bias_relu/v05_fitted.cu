// v05_fitted: hgemm's v18 with bias and ReLU on the sums of a tile, before they are stored.
// Idea: for 129 to 2048 rows, many rows of v04's 256-row tiles lie outside of the product, or many SMs get no tile. v18's tiles
// have nearly any height. As v18 swaps the operands, a thread's sums lie in two of each 64 columns, so it loads two biases.
// Expected: the speed of hgemm's v18 less 1 % (H100).
#include "biased_columns.cuh"

namespace minfer {

template <typename T>
__device__ inline Relu activation_of(const Biased<T>&) {
  return {};
}

template <typename T>
void launch(const Biased<T>& g) {
  require_rows(g);
  g.layout == Layout::TN ? launch_fitting<Layout::TN, BiasedColumns<T, Relu>>(g)
                         : launch_fitting<Layout::NN, BiasedColumns<T, Relu>>(g);
}

}  // namespace minfer

MINFER_GEMM_BIAS_RELU(gemm_bias_relu_v05_fitted, minfer::launch)
