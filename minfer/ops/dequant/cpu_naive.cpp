// cpu_naive: eight weights at a time, threads over the rows.
// Idea: the definition on a CPU, for comparison: each weight is decoded from its bytes as a reader of the format would.
// Expected: about 0.5 GB/s a core, bound by shifts, masks and conversions.
#include <torch/csrc/stable/ops.h>

#include "dequant.h"
#include "ops/halves.h"

namespace minfer {

template <typename F, typename T, typename S>
void launch(T* y, const Weights<S>& weights) {
  torch::stable::parallel_for(0, weights.n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int k = 0; k < weights.k; k += 8) {
        float values[8];
        eight_weights<F>(weights, row, k, values);
        for (int i = 0; i < 8; ++i) y[row * weights.k + k + i] = narrow<T>(values[i]);
      }
  });
}

}  // namespace minfer

MINFER_DEQUANT(dequant_cpu_naive)
