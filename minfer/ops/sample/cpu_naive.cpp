// cpu_naive: a row's logits sorted, then the definition in three loops, threads over the rows.
// Idea: the definition on a CPU, for comparison; masses are fp64.
// Expected: bound by the sort: about 10 ms a row of 128,256 and core.
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "sample.h"

namespace minfer {

template <typename T>
int32_t draw(const Sample<T>& p, int row) {
  const T* x = p.logits + row * p.stride;
  float most = -INFINITY;
  for (int i = 0; i < p.vocab; ++i) most = std::max(most, static_cast<float>(x[i]));
  std::vector<float> octaves(p.vocab);  // below the most probable; infinity for NaN
  for (int i = 0; i < p.vocab; ++i) {
    const float value = static_cast<float>(x[i]);
    octaves[i] = value == most ? 0.0f : value < most ? (most - value) * p.scale : INFINITY;
  }
  const auto mass = [](float distance) { return std::exp2(-static_cast<double>(distance)); };
  float limit = p.min_p_octaves;  // what is farther is not kept
  if (p.top_k || p.top_p < 1) {
    std::vector<float> sorted = octaves;
    std::sort(sorted.begin(), sorted.end());
    if (p.top_k) limit = std::min(limit, sorted[p.top_k - 1]);
    if (p.top_p < 1) {
      double all = 0, sum = 0;
      for (const float each : sorted) all += !p.top_k || each <= sorted[p.top_k - 1] ? mass(each) : 0;
      size_t i = 0;
      while (i < sorted.size() && (sum += mass(sorted[i])) < p.top_p * all) ++i;
      limit = std::min(limit, sorted[std::min(i, sorted.size() - 1)]);
    }
  }
  double all = 0, sum = 0;
  for (const float each : octaves) all += each <= limit ? mass(each) : 0;
  int32_t last = 0;
  for (int i = 0; i < p.vocab; ++i) {
    if (octaves[i] > limit || std::isinf(octaves[i])) continue;
    last = i;
    if ((sum += mass(octaves[i])) > p.u[row] * all) break;
  }
  return last;
}

template <typename T>
void launch(const Sample<T>& p) {
  torch::stable::parallel_for(0, p.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) p.tokens[row] = draw(p, static_cast<int>(row));
  });
}

}  // namespace minfer

MINFER_SAMPLE(sample_cpu_naive, minfer::launch)
