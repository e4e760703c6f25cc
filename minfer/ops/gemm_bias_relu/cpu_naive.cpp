// cpu_naive: the three nested loops, accumulated in float32, threads over the rows.
// Idea: the definition on a CPU, for comparison; each operand is converted from half where it is used.
// Expected: about 1 GFLOP/s a core, as hgemm's, whose cpu_blocked shows what blocking gains.
#include "gemm_bias_relu.h"
#include "ops/gemm_bias_cpu.h"

namespace minfer {

template <typename T>
void launch(const Biased<T>& g) {
  product_with_bias(g, relu);
}

}  // namespace minfer

MINFER_GEMM_BIAS_RELU(gemm_bias_relu_cpu_naive, minfer::launch)
