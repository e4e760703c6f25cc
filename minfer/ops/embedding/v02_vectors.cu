// v02_vectors: 16-byte loads and stores, all loads of a thread issued before the first is stored.
// Idea: a row is a chain of two latencies, the id's and then the row's, so an SM must have twice as many bytes under way as
// a copy: a thread takes kMany vectors, a block of 128 a row of 4096 half elements, and 16 blocks of an SM have 128 KB of
// rows under way. With few tokens a row is shared by several blocks, one vector a thread, so that several SMs fetch it.
// Expected: near the copy's speed for many tokens: at 16384 of 4096 half elements 268 MB, 63 us at 4.28 TB/s. For few, two
// latencies of memory, about 1.5 us, and a launch.
// Measured (H200, bfloat16, int64, tokens=16384, vocab=128256, hidden=4096): 3715 GB/s cold; 105.3 % of torch.
#include "cuda/vector.cuh"
#include "embedding.h"

namespace minfer {

constexpr int kThreads = 128, kMany = 4;

template <typename T, typename Id, int kVectors>
__global__ void __launch_bounds__(kThreads) vectors(Embedding<T, Id> p, int count) {
  const int64_t id = p.ids[blockIdx.x];
  const bool inside = id >= 0 && id < p.vocab;
  const int first = blockIdx.y * (kThreads * kVectors) + threadIdx.x;
  const uint4* from = reinterpret_cast<const uint4*>(p.table + (inside ? id : 0) * p.table_stride);
  uint4* to = reinterpret_cast<uint4*>(p.y + blockIdx.x * p.y_stride);
  Vector<T> row[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = first + v * kThreads;
    if (at < count && inside) row[v].bits = from[at];
  }
  if (!inside) {
    float nothing[Vector<T>::kCount];
#pragma unroll
    for (float& value : nothing) value = NAN;
#pragma unroll
    for (Vector<T>& vector : row) vector = Vector<T>(nothing);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = first + v * kThreads;
    if (at < count) to[at] = row[v].bits;  //@ row_end
  }
}

template <int kVectors, typename T, typename Id>
void launch_with(const Embedding<T, Id>& p) {
  const int count = p.hidden / Vector<T>::kCount, chunk = kThreads * kVectors;
  vectors<T, Id, kVectors><<<dim3(p.tokens, (count + chunk - 1) / chunk), kThreads, 0, p.stream>>>(p, count);
}

template <typename T, typename Id>
void launch(const Embedding<T, Id>& p) {
  require_vectors(p);
  if (p.tokens <= 2 * multiprocessors())
    launch_with<1>(p);
  else
    launch_with<kMany>(p);
}

}  // namespace minfer

MINFER_EMBEDDING(embedding_v02_vectors, minfer::launch)
