// cpu_naive: three loops, accumulated in float32, threads over the rows of W, of which each is decoded once.
// Idea: the definition on a CPU, for comparison; a decoded row serves all rows of x.
// Expected: about 1 GFLOP/s a core, bound by the conversions of x.
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "ops/halves.h"
#include "quant_gemm.h"

namespace minfer {

template <typename X>
float value_of(X x) {
  if constexpr (std::is_same_v<X, uint8_t>) return from_e4m3(x);
  else return widen(x);
}

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  torch::stable::parallel_for(0, p.n, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(p.k);
    for (int64_t col = begin; col < end; ++col) {
      for (int k = 0; k < p.k; k += 8) {
        float values[8];
        eight_weights<F>(p.weights, col, k, values);
        for (int i = 0; i < 8; ++i) row[k + i] = values[i];
      }
      for (int64_t i = 0; i < p.m; ++i) {
        float sum = 0.0f;
        for (int k = 0; k < p.k; ++k) sum += value_of(p.x[i * p.k + k]) * row[k];
        if (p.x_scales) sum *= p.x_scales[i];
        p.y[i * p.n + col] = narrow<T>(sum);
      }
    }
  });
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_cpu_naive, true, true, minfer::launch)
