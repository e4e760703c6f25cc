// cpu_rows: a row after the other, threads over the rows.
// Idea: the definition on a CPU; the weights are computed once a row, and the loop over its elements is vectorised.
// Expected: the speed of the conversions of a half type, a few elements a nanosecond and core.
#include <torch/csrc/stable/ops.h>

#include "merge_state.h"

namespace minfer {

template <typename T>
void launch(const States<T>& p) {
  const int64_t rows = int64_t(p.batch) * p.seq * p.heads, of_task = 1 + 4096 / p.dim;
  torch::stable::parallel_for(0, rows, of_task, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int head = static_cast<int>(row % p.heads), token = static_cast<int>(row / p.heads % p.seq);
      const int64_t number = row / p.heads / p.seq;
      const float a_lse = p.a_lse.at(number, head, token), b_lse = p.b_lse.at(number, head, token);
      const Weights weights(a_lse, b_lse);
      const T *a = p.a.at(number, token, head), *b = p.b.at(number, token, head);
      T* out = p.out.at(number, token, head);
      for (int i = 0; i < p.dim; ++i) out[i] = T(weights.merge(float(a[i]), float(b[i])));
      p.lse.at(number, head, token) = log_add_exp(a_lse, b_lse);
    }
  });
}

}  // namespace minfer

MINFER_MERGE_STATE(merge_state_cpu_rows, minfer::launch)
