// cpu_naive: three nested loops, accumulated in float32; threads share the rows.
// Idea: the definition on a CPU, for comparison. Each operand is converted from half where it is used.
// Expected: about 1 GFLOP/s a core, like hgemm's cpu_naive; hgemm's cpu_blocked shows what blocking gains.
#include <cmath>

#include "gemm_bias_gelu.h"
#include "ops/gemm_bias_cpu.h"

namespace minfer {

template <typename T>
void launch(const Biased<T>& g, Gelu gelu) {
  product_with_bias(g, gelu);
}

}  // namespace minfer

MINFER_GEMM_BIAS_GELU(gemm_bias_gelu_cpu_naive, minfer::launch)
