// cpu_vectors: the sum of squares in 32 parts, so that the compiler makes vectors of it; threads over the rows.
// Idea: as rmsnorm's cpu_vectors, with the new residual written in the pass that adds it up.
// Expected: the speed of memory with a few cores.
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "add_rmsnorm.h"
#include "ops/halves.h"

namespace minfer {

constexpr int kParts = 32;  // four vectors of 8 floats: as many additions as are in flight at once

template <typename T>
void launch(const AddRmsNorm<T>& p) {
  const int64_t rows = 1 + 16384 / p.hidden;  // of a task, at least: a thread has more to do than to be told of it
  torch::stable::parallel_for(0, p.tokens, rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* __restrict__ x = p.x + row * p.x_stride;
      T* __restrict__ residual = p.residual + row * p.residual_stride;
      T* __restrict__ y = p.y + row * p.y_stride;
      float parts[kParts] = {};
      const auto add = [&](int i, int j) {
        residual[i + j] = narrow<T>(widen(residual[i + j]) + widen(x[i + j]));
        const float total = widen(residual[i + j]);
        parts[j] += total * total;
      };
      int i = 0;
      for (; i + kParts <= p.hidden; i += kParts)
        for (int j = 0; j < kParts; ++j) add(i, j);
      for (int j = 0; i + j < p.hidden; ++j) add(i, j);
      for (int width = kParts / 2; width > 0; width /= 2)
        for (int j = 0; j < width; ++j) parts[j] += parts[j + width];
      const float scale = 1.0f / std::sqrt(parts[0] * p.share + p.eps);
      for (int k = 0; k < p.hidden; ++k) y[k] = narrow<T>(widen(residual[k]) * scale * widen(p.weight[k]));
    }
  });
}

}  // namespace minfer

MINFER_ADD_RMSNORM(add_rmsnorm_cpu_vectors, minfer::launch)
