// cpu_loops: the definition, element by element, threads over the rows.
// Idea: the definition on a CPU, for comparison.
// Expected: bound by the exponential of the C library, about 5 ns an element and core.
#include <torch/csrc/stable/ops.h>

#include "silu_mul.h"

namespace minfer {

template <typename T, typename Function>
void launch(const Rows<T, Function>& p) {
  const int64_t rows = 1 + 4096 / p.hidden;  // of a task, at least: a thread has more to do than to be told of it
  torch::stable::parallel_for(0, p.tokens, rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int at = 0; at < p.hidden; ++at) {
        float x[p.kInputs], y[p.kOutputs];
        for (int i = 0; i < p.kInputs; ++i) x[i] = static_cast<float>(p.input[i][row * p.input_stride[i] + at]);
        Function()(x, y);
        for (int i = 0; i < p.kOutputs; ++i) p.output[i][row * p.output_stride[i] + at] = static_cast<T>(y[i]);
      }
    }
  });
}

}  // namespace minfer

MINFER_SILU_MUL(silu_mul_cpu_loops, minfer::launch)
