// cpu_naive: sorts a row's logits, then applies the definition in three loops. The threads share the rows.
// Idea: the definition on a CPU, for comparison; masses are fp64.
// Expected: bound by the sort: a core takes about 10 ms for a row of 128,256.
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "sample_rows.h"

namespace minfer {

// The token of one row.
template <typename T>
int32_t draw(const Sample<T>& p) {
  float most = -INFINITY;
  for (int i = 0; i < p.vocab; ++i) most = std::max(most, static_cast<float>(p.logits[i]));
  std::vector<float> octaves(p.vocab);  // how far each is below the most probable; infinity for NaN
  for (int i = 0; i < p.vocab; ++i) {
    const float value = static_cast<float>(p.logits[i]);
    octaves[i] = value == most ? 0.0f : value < most ? (most - value) * p.scale : INFINITY;
  }
  const auto mass = [](float distance) { return std::exp2(-static_cast<double>(distance)); };
  float limit = p.min_p_octaves;  // tokens that are farther away are not kept
  if (p.top_k || p.top_p < 1) {
    std::vector<float> sorted = octaves;
    std::sort(sorted.begin(), sorted.end());
    const float farthest = p.top_k ? sorted[p.top_k - 1] : INFINITY;
    limit = std::min(limit, farthest);
    if (p.top_p < 1) {
      double all = 0, sum = 0;
      for (const float each : sorted) all += each <= farthest ? mass(each) : 0;
      size_t i = 0;
      while (i + 1 < sorted.size() && (sum += mass(sorted[i])) < p.top_p * all) ++i;
      limit = std::min(limit, sorted[i]);
    }
  }
  double all = 0, sum = 0;
  for (const float each : octaves) all += each <= limit ? mass(each) : 0;
  int32_t last = 0;
  for (int i = 0; i < p.vocab; ++i) {
    if (octaves[i] > limit || std::isinf(octaves[i])) continue;
    last = i;
    if ((sum += mass(octaves[i])) > *p.u * all) break;
  }
  return last;
}

template <typename T>
void launch(const SampleRows<T>& p) {
  const float zero = 0.0f;
  torch::stable::parallel_for(0, p.all.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Sample<T> own = p.of(static_cast<int>(row), &zero);
      *own.tokens = draw(own);
    }
  });
}

}  // namespace minfer

MINFER_SAMPLE_ROWS(sample_rows_cpu_naive, minfer::launch)
