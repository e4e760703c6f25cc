// cpu_rows: two loops over a row, threads over the rows.
// Idea: the values of a row are kept as fp32 between the loops, because an exponential costs more than a load.
// Expected: bound by the exponential of the C library, about 5 ns an element and core.
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "silu_mul_quant.h"

namespace minfer {

template <typename T, typename Y>
void launch(const SiluMulQuant<T, Y>& p) {
  const int64_t rows = 1 + 4096 / p.hidden;  // of a task, at least: a thread has more to do than to be told of it
  torch::stable::parallel_for(0, p.tokens, rows, [&](int64_t begin, int64_t end) {
    std::vector<float> values(p.hidden);
    for (int64_t row = begin; row < end; ++row) {
      float largest = 0.0f;
      for (int i = 0; i < p.hidden; ++i) {
        values[i] = silu_times(static_cast<float>(p.gate[row * p.gate_stride + i]), static_cast<float>(p.up[row * p.up_stride + i]));
        largest = std::max(largest, std::fabs(values[i]));
      }
      const float factor = factor_of_row<Y>(largest);
      p.scales[row] = largest / kMostOfByte<Y>;
      for (int i = 0; i < p.hidden; ++i) to_byte(p.y[row * p.hidden + i], values[i] * factor);
    }
  });
}

}  // namespace minfer

MINFER_SILU_MUL_QUANT(silu_mul_quant_cpu_rows, minfer::launch)
