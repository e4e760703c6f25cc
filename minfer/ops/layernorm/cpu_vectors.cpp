// cpu_vectors: both sums in 32 parts, so that the compiler makes vectors of them; threads over the rows.
// Idea: as rmsnorm's cpu_vectors. The second and the third pass find the row in the first cache.
// Expected: the speed of memory with a few cores.
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "layernorm.h"
#include "ops/halves.h"

namespace minfer {

constexpr int kParts = 32;  // four vectors of 8 floats: as many additions as are in flight at once

// f(0) + ... + f(count - 1), in any order.
template <typename F>
float sum(int count, F f) {
  float parts[kParts] = {};
  int i = 0;
  for (; i + kParts <= count; i += kParts)
    for (int j = 0; j < kParts; ++j) parts[j] += f(i + j);
  for (int j = 0; i + j < count; ++j) parts[j] += f(i + j);
  for (int width = kParts / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) parts[j] += parts[j + width];
  return parts[0];
}

template <typename T>
void launch(const LayerNorm<T>& p) {
  const int64_t rows = 1 + 16384 / p.hidden;  // of a task, at least: a thread has more to do than to be told of it
  torch::stable::parallel_for(0, p.tokens, rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = p.x + row * p.x_stride;
      T* __restrict__ y = p.y + row * p.y_stride;
      const float mean = sum(p.hidden, [=](int i) { return widen(x[i]); }) * p.share;
      const float variance = sum(p.hidden, [=](int i) { return (widen(x[i]) - mean) * (widen(x[i]) - mean); }) * p.share;
      const float scale = 1.0f / std::sqrt(variance + p.eps);
      for (int i = 0; i < p.hidden; ++i)
        y[i] = narrow<T>((widen(x[i]) - mean) * scale * widen(p.weight[i]) + widen(p.bias[i]));
    }
  });
}

}  // namespace minfer

MINFER_LAYERNORM(layernorm_cpu_vectors, minfer::launch)
