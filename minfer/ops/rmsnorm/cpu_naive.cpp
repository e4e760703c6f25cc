// cpu_naive: the definition in two loops a row, summed up in float32, threads over the rows.
// Idea: the definition on a CPU, for comparison.
// Expected: bound by the sum, in which each addition waits for the one before: four cycles an element, about 2 GB/s a
// core for a half type.
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "rmsnorm.h"

namespace minfer {

template <typename T>
void launch(const RmsNorm<T>& p) {
  torch::stable::parallel_for(0, p.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = p.x + row * p.x_stride;
      T* y = p.y + row * p.y_stride;
      float sum = 0.0f;
      for (int i = 0; i < p.hidden; ++i) sum += static_cast<float>(x[i]) * static_cast<float>(x[i]);
      const float scale = 1.0f / std::sqrt(sum * p.share + p.eps);
      for (int i = 0; i < p.hidden; ++i)
        y[i] = static_cast<T>(static_cast<float>(x[i]) * scale * static_cast<float>(p.weight[i]));
    }
  });
}

}  // namespace minfer

MINFER_RMSNORM(rmsnorm_cpu_naive, minfer::launch)
