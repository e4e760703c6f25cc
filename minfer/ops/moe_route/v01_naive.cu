// v01_naive: three launches: a thread a token chooses, a thread an expert counts, and a thread an expert puts in order.
// Idea: the definition, nothing else. A thread that goes through all slots in order needs no atomics, and its result does
// not depend on any other thread.
// Expected: three launches of 2 us; the second and third take tokens * k dependent steps each, 32,768 at 4096 tokens and
// k = 8, at some cycles a step: hundreds of microseconds.
// Measured (H200, float32, tokens=4096, experts=128, k=8): 0.9971 GB/s cold; 6.39 % of torch.
#include "moe_route.h"

namespace minfer {

constexpr int kThreads = 128;

// Whether logit a comes before b: a NaN above all numbers.
__device__ inline bool above(float a, float b) { return a > b || (a != a && b == b); }

template <typename T>
__global__ void __launch_bounds__(kThreads) choose(Route<T> p) {
  const int token = blockIdx.x * kThreads + threadIdx.x;
  if (token >= p.tokens) return;
  const T* x = p.logits + token * p.stride;
  int32_t* chosen = p.indices + int64_t(token) * p.k;
  float* weights = p.weights + int64_t(token) * p.k;
  float last = 0.0f, most = 0.0f, sum = 0.0f;
  for (int rank = 0, last_at = -1; rank < p.k; ++rank) {
    float best = 0.0f;
    int at = -1;
    for (int e = 0; e < p.experts; ++e) {
      const float value = float(x[e]);
      const bool equal = !above(value, last) && !above(last, value);
      const bool left = rank == 0 || above(last, value) || (equal && e > last_at);
      if (left && (at < 0 || above(value, best))) best = value, at = e;
    }
    last = best, last_at = chosen[rank] = at;
    if (rank == 0) most = best;
    weights[rank] = expf(best - most);
    sum += weights[rank];
  }
  if (!p.normalize) {
    sum = 0.0f;
    for (int e = 0; e < p.experts; ++e) sum += expf(float(x[e]) - most);
  }
  for (int rank = 0; rank < p.k; ++rank) weights[rank] /= sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) count(Route<T> p) {
  const int expert = blockIdx.x * kThreads + threadIdx.x, slots = p.tokens * p.k;
  if (expert >= p.experts) return;
  int own = 0, before = 0;  // slots of this expert, and of those before it
  for (int slot = 0; slot < slots; ++slot) own += p.indices[slot] == expert, before += p.indices[slot] < expert;
  p.counts[expert] = own, p.offsets[expert] = before + own;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sort(Route<T> p) {
  const int expert = blockIdx.x * kThreads + threadIdx.x, slots = p.tokens * p.k;
  if (expert >= p.experts) return;
  int next = p.offsets[expert] - p.counts[expert];
  for (int slot = 0; slot < slots; ++slot)
    if (p.indices[slot] == expert) p.order[next++] = slot;
}

template <typename T>
void launch(const Route<T>& p) {
  const int of_experts = (p.experts + kThreads - 1) / kThreads;
  choose<<<(p.tokens + kThreads - 1) / kThreads, kThreads, 0, p.stream>>>(p);
  count<<<of_experts, kThreads, 0, p.stream>>>(p);
  sort<<<of_experts, kThreads, 0, p.stream>>>(p);
}

}  // namespace minfer

MINFER_MOE_ROUTE(moe_route_v01_naive, minfer::launch)
