// v01_naive: each element sums its whole sequence again: a thread for an element.
// Idea: the definition, O(batch * length^2); the threads of a warp read the same element at once, which is one request.
// Expected: at 2048 elements a hundred times v02_block's time or more: each thread makes 2048 loads from L1, one after the
// other. With packed sequences many blocks have nothing to do, which costs some microseconds.
// Measured (H200, float32, padded, full, batch=1024, longest=2048): 26.74 GB/s cold; 1.94 % of torch.
#include <algorithm>

#include "seq_sum.h"

namespace minfer {

constexpr int kThreads = 128;
constexpr int kMostBlocks = 64;  // of one sequence; in longer ones a thread takes several elements

template <typename T>
__global__ void __launch_bounds__(kThreads) naive(SeqSum<T> p) {
  const Sequence<T> s = p.sequence(blockIdx.x);
  for (int i = blockIdx.y * kThreads + threadIdx.x; i < s.room; i += gridDim.y * kThreads) {
    float sum = 0.0f;
    if (i < s.length)
      for (int j = 0; j < s.length; ++j) sum += float(s.x[j]);
    s.y[i] = T(sum);
  }
}

template <typename T>
void launch(const SeqSum<T>& p) {
  const unsigned blocks = std::min((p.longest - 1) / kThreads + 1, kMostBlocks);
  naive<<<dim3(p.count(), blocks), kThreads, 0, p.stream>>>(p);
}

}  // namespace minfer

MINFER_SEQ_SUM(seq_sum_v01_naive, minfer::launch)
