// cpu_naive: the three nested loops, accumulated in float32, threads over the rows.
// Idea: the definition on a CPU, for comparison; each operand is converted from half where it is used.
// Expected: about 1 GFLOP/s a core, bound by the conversions and, in NN, by strided reads of B.
#include <torch/csrc/stable/ops.h>

#include "hgemm.h"

namespace minfer {

template <typename T>
void launch(const Gemm<T>& g) {
  const int64_t k_stride = g.layout == Layout::TN ? 1 : g.ldb, n_stride = g.layout == Layout::TN ? g.ldb : 1;
  torch::stable::parallel_for(0, g.m, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t j = 0; j < g.n; ++j) {
        float sum = 0.0f;
        for (int64_t k = 0; k < g.k; ++k)
          sum += static_cast<float>(g.a[i * g.lda + k]) * static_cast<float>(g.b[k * k_stride + j * n_stride]);
        T& c = g.c[i * g.ldc + j];
        c = static_cast<T>(g.alpha * sum + (g.beta != 0.0f ? g.beta * static_cast<float>(c) : 0.0f));
      }
  });
}

}  // namespace minfer

MINFER_HGEMM(hgemm_cpu_naive, minfer::launch)
