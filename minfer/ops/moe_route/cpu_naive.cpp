// cpu_naive: a pass over a token's logits for each of its k experts, threads over the tokens; then a counting sort.
// Idea: the definition on a CPU, for comparison; the sort is two passes over the indices, by one thread.
// Expected: k passes over `experts` logits that lie in the first cache, about a nanosecond a logit and pass: 1 us a token
// and core at 128 experts and k = 8.
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <vector>

#include "moe_route.h"

namespace minfer {

// The k largest of a token, a NaN above all numbers and the first of equals before the others; and their weights.
template <typename T>
void choose(const Route<T>& p, int token) {
  const T* x = p.logits + token * p.stride;
  int32_t* chosen = p.indices + int64_t(token) * p.k;
  float* weights = p.weights + int64_t(token) * p.k;
  const auto above = [&](int a, int b) {
    const float one = static_cast<float>(x[a]), other = static_cast<float>(x[b]);
    return one > other || (std::isnan(one) && !std::isnan(other));
  };
  std::vector<char> taken(p.experts, false);
  for (int rank = 0; rank < p.k; ++rank) {
    int best = -1;
    for (int e = 0; e < p.experts; ++e)
      if (!taken[e] && (best < 0 || above(e, best))) best = e;
    taken[best] = true, chosen[rank] = best;
  }
  const float most = static_cast<float>(x[chosen[0]]);
  float sum = 0.0f;
  if (p.normalize)
    for (int rank = 0; rank < p.k; ++rank) sum += std::exp(static_cast<float>(x[chosen[rank]]) - most);
  else
    for (int e = 0; e < p.experts; ++e) sum += std::exp(static_cast<float>(x[e]) - most);
  for (int rank = 0; rank < p.k; ++rank) weights[rank] = std::exp(static_cast<float>(x[chosen[rank]]) - most) / sum;
}

template <typename T>
void launch(const Route<T>& p) {
  torch::stable::parallel_for(0, p.tokens, 16, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) choose(p, static_cast<int>(token));
  });
  for (int e = 0; e < p.experts; ++e) p.counts[e] = 0;
  const int slots = p.tokens * p.k;
  for (int slot = 0; slot < slots; ++slot) ++p.counts[p.indices[slot]];
  std::vector<int32_t> next(p.experts);
  for (int e = 0, end = 0; e < p.experts; ++e) next[e] = end, p.offsets[e] = end += p.counts[e];
  for (int slot = 0; slot < slots; ++slot) p.order[next[p.indices[slot]]++] = slot;
}

}  // namespace minfer

MINFER_MOE_ROUTE(moe_route_cpu_naive, minfer::launch)
