// v01_naive: one element a thread.
// Idea: the definition, for heads of any size; neighbouring threads take neighbouring elements of a head.
// Expected: half of the copy's speed, because each element costs an exponential and a division and each load of a warp is only 64 bytes.
#include "merge_state.h"

namespace minfer {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) naive(States<T> p, int64_t count) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= count) return;
  const int64_t row = index / p.dim, of_batch = row / p.heads;
  const int at = static_cast<int>(index - row * p.dim), head = static_cast<int>(row - of_batch * p.heads);
  const int64_t number = of_batch / p.seq;
  const int token = static_cast<int>(of_batch - number * p.seq);
  const float a_lse = p.a_lse.at(number, head, token), b_lse = p.b_lse.at(number, head, token);
  const float a = float(p.a.at(number, token, head)[at]), b = float(p.b.at(number, token, head)[at]);
  p.out.at(number, token, head)[at] = T(Weights(a_lse, b_lse).merge(a, b));
  if (at == 0) p.lse.at(number, head, token) = log_add_exp(a_lse, b_lse);
}

template <typename T>
void launch(const States<T>& p) {
  const int64_t count = int64_t(p.batch) * p.seq * p.heads * p.dim, blocks = (count + kThreads - 1) / kThreads;
  STD_TORCH_CHECK(blocks <= INT_MAX, "merge_state: a must have fewer than 2^39 elements");
  naive<T><<<static_cast<unsigned>(blocks), kThreads, 0, p.stream>>>(p, count);
}

}  // namespace minfer

MINFER_MERGE_STATE(merge_state_v01_naive, minfer::launch)
