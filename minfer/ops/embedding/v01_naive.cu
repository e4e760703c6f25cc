// v01_naive: one block a row, one element a load.
// Idea: the definition, nothing else; neighbouring threads take neighbouring elements.
// Expected: half of the copy's speed or less. A thread copies an element, waits for it, and only then asks for the next but
// for what the compiler unrolls; a warp has 64 bytes of a half type under way.
// Measured (H200, bfloat16, int64, tokens=16384, vocab=128256, hidden=4096): 1938 GB/s cold; 54.9 % of torch.
#include "embedding.h"

namespace minfer {

constexpr int kThreads = 256;

template <typename T, typename Id>
__global__ void __launch_bounds__(kThreads) naive(Embedding<T, Id> p) {
  const int64_t id = p.ids[blockIdx.x];
  const bool inside = id >= 0 && id < p.vocab;
  T* y = p.y + blockIdx.x * p.y_stride;
  for (int i = threadIdx.x; i < p.hidden; i += kThreads) y[i] = inside ? p.table[id * p.table_stride + i] : T(NAN);
}

template <typename T, typename Id>
void launch(const Embedding<T, Id>& p) {
  naive<<<p.tokens, kThreads, 0, p.stream>>>(p);
}

}  // namespace minfer

MINFER_EMBEDDING(embedding_v01_naive, minfer::launch)
