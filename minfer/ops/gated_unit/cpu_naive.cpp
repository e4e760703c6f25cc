// cpu_naive: the three nested loops with two sums, accumulated in float32, threads over the rows.
// Idea: the definition on a CPU, for comparison; each operand is converted from half where it is used.
// Expected: about 1 GFLOP/s a core, bound by the conversions and, in NN, by strided reads of the weights.
#include <torch/csrc/stable/ops.h>

#include "gated_unit.h"

namespace minfer {

template <typename T>
void launch(const Gated<T>& g) {
  const bool tn = g.layout == Layout::TN;
  const int64_t k1 = tn ? 1 : g.ldb, n1 = tn ? g.ldb : 1, k2 = tn ? 1 : g.ldw2, n2 = tn ? g.ldw2 : 1;
  torch::stable::parallel_for(0, g.m, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t j = 0; j < g.n; ++j) {
        float h1 = 0.0f, h2 = 0.0f;
        for (int64_t k = 0; k < g.k; ++k) {
          const float x = static_cast<float>(g.a[i * g.lda + k]);
          h1 += x * static_cast<float>(g.b[k * k1 + j * n1]), h2 += x * static_cast<float>(g.w2[k * k2 + j * n2]);
        }
        if (g.bias1) h1 += static_cast<float>(g.bias1[j]), h2 += static_cast<float>(g.bias2[j]);
        g.c[i * g.ldc + j] = static_cast<T>(gated(h1, h2, g.silu));
      }
  });
}

}  // namespace minfer

MINFER_GATED_UNIT(gated_unit_cpu_naive, minfer::launch)
