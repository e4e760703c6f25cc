// cpu_naive: the definition in three loops a row, summed up in float32, threads over the rows.
// Idea: the definition on a CPU, for comparison.
// Expected: bound by the exponential function, called twice for each element: about 10 ns an element and core.
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "softmax.h"

namespace minfer {

template <typename T>
void launch(const Softmax<T>& p) {
  torch::stable::parallel_for(0, p.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = p.x + row * p.x_stride;
      T* y = p.y + row * p.y_stride;
      const int valid = p.valid(static_cast<int>(row));
      const auto logit = [&](int i) {
        return static_cast<float>(x[i]) + (p.bias ? static_cast<float>(p.bias[i]) : 0.0f);
      };
      float max = -INFINITY, sum = 0.0f;
      for (int i = 0; i < valid; ++i) max = std::fmax(max, logit(i));
      const float base = max == -INFINITY ? 0.0f : max;  // all -inf: not NaN yet, but from the quotient on
      for (int i = 0; i < valid; ++i) sum += std::exp(logit(i) - base);
      const float scale = 1.0f / sum;
      for (int i = 0; i < p.n; ++i) y[i] = static_cast<T>((i < valid ? std::exp(logit(i) - base) : 0.0f) * scale);
    }
  });
}

}  // namespace minfer

MINFER_SOFTMAX(softmax_cpu_naive, minfer::launch)
