// cpu_naive: three nested loops, accumulated in float32; threads share the rows.
// Idea: the definition on a CPU, for comparison. Each operand is converted from half where it is used.
// Expected: about 1 GFLOP/s a core, like hgemm's cpu_naive; hgemm's cpu_blocked shows what blocking gains.
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "gemm_bias_gelu.h"

namespace minfer {

template <typename T>
void launch(const Biased<T>& g, Gelu gelu) {
  const int64_t k_stride = g.layout == Layout::TN ? 1 : g.ldb, n_stride = g.layout == Layout::TN ? g.ldb : 1;
  torch::stable::parallel_for(0, g.m, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t j = 0; j < g.n; ++j) {
        float sum = static_cast<float>(g.bias[j]);
        for (int64_t k = 0; k < g.k; ++k)
          sum += static_cast<float>(g.a[i * g.lda + k]) * static_cast<float>(g.b[k * k_stride + j * n_stride]);
        g.c[i * g.ldc + j] = static_cast<T>(gelu(sum));
      }
  });
}

}  // namespace minfer

MINFER_GEMM_BIAS_GELU(gemm_bias_gelu_cpu_naive, minfer::launch)
