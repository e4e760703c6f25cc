// cpu_naive: the definition, threads over the rows of C.
// Idea: the definition on a CPU, for comparison; the innermost loop goes down a column of B.
// Expected: each multiply-add waits for the one before it, four cycles or more: about 1 GFLOP/s a core.
#include <torch/csrc/stable/ops.h>

#include "sgemm.h"

namespace minfer {

void launch(const Sgemm& g) {
  torch::stable::parallel_for(0, g.m, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int col = 0; col < g.n; ++col) {
        float sum = 0.0f;
        for (int k = 0; k < g.k; ++k) sum += g.a[row * g.lda + k] * g.b[k * g.ldb + col];
        g.c[row * g.ldc + col] = sum;
      }
  });
}

}  // namespace minfer

MINFER_SGEMM(sgemm_cpu_naive, minfer::launch)
