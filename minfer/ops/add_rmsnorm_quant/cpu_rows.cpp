// cpu_rows: two loops over a row, threads over the rows.
// Idea: the first loop adds, writes the residual, and finds the sum of squares and the largest product with a weight.
// Expected: the speed of memory with a few cores; the conversion to fp8 takes about 2 ns an element and core.
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "add_rmsnorm_quant.h"
#include "ops/halves.h"

namespace minfer {

constexpr int kParts = 32;  // four vectors of 8 floats: as many additions as are in flight at once

template <typename T, typename Y>
void launch(const AddRmsNormQuant<T, Y>& p) {
  const int64_t rows = 1 + 16384 / p.hidden;  // of a task, at least: a thread has more to do than to be told of it
  torch::stable::parallel_for(0, p.tokens, rows, [&](int64_t begin, int64_t end) {
    std::vector<float> values(p.hidden);
    for (int64_t row = begin; row < end; ++row) {
      const T* x = p.x + row * p.x_stride;
      T* residual = p.residual ? p.residual + row * p.residual_stride : nullptr;
      float parts[kParts] = {}, largest = 0.0f, squares = 0.0f;
      for (int i = 0; i < p.hidden; ++i) {
        float total = widen(x[i]);
        if (residual) residual[i] = narrow<T>(widen(residual[i]) + total), total = widen(residual[i]);
        parts[i % kParts] += total * total;
        values[i] = total * widen(p.weight[i]);
        largest = std::max(largest, std::fabs(values[i]));
      }
      for (const float part : parts) squares += part;
      const float factor = factor_of_row<Y>(largest);
      p.scales[row] = largest / std::sqrt(squares * p.share + p.eps) / kMostOfByte<Y>;
      for (int i = 0; i < p.hidden; ++i) to_byte(p.y[row * p.hidden + i], values[i] * factor);
    }
  });
}

}  // namespace minfer

MINFER_ADD_RMSNORM_QUANT(add_rmsnorm_quant_cpu_rows, minfer::launch)
