// cpu_naive: each element sums its whole sequence again, in float32, threads over the sequences.
// Idea: the definition on a CPU: O(batch * length^2).
// Expected: bound by additions that wait for each other, four cycles each: about 1 ns an element of the sequence and of y.
#include <torch/csrc/stable/ops.h>

#include "seq_sum.h"

namespace minfer {

template <typename T>
void launch(const SeqSum<T>& p) {
  torch::stable::parallel_for(0, p.count(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      const Sequence<T> s = p.sequence(static_cast<int>(number));
      for (int i = 0; i < s.room; ++i) {
        float sum = 0.0f;
        for (int j = 0; i < s.length && j < s.length; ++j) sum += static_cast<float>(s.x[j]);
        s.y[i] = static_cast<T>(sum);
      }
    }
  });
}

}  // namespace minfer

MINFER_SEQ_SUM(seq_sum_cpu_naive, minfer::launch)
