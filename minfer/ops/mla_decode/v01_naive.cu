// v01_naive: a block for a query head of a sequence: scores of 128 keys at a time, a thread each, online softmax, fp32 FMA.
// Idea: the definition with as much memory as a block has: q and the exponentials of 128 keys lie in shared memory.
// Expected: far from any roof. 128 heads read the same rows 128 times, and each thread reads the row of its key alone, so
// that a load of a warp touches 32 rows of 1152 bytes.
#include "cuda/softmax.cuh"
#include "mla_decode.h"

namespace minfer {

constexpr int kThreads = 128, kColumns = kLatent / kThreads;

template <typename T>
__global__ void __launch_bounds__(kThreads) naive(Mla<T> p) {
  __shared__ float q[kRow];
  __shared__ float exponentials[kThreads];
  __shared__ float of_max[kThreads / 32];
  __shared__ float of_sum[kThreads / 32];
  const int head = blockIdx.x, number = blockIdx.y / p.new_tokens, query = blockIdx.y % p.new_tokens;
  const int seen = p.seen(query, p.keys(number));
  for (int i = threadIdx.x; i < kRow; i += kThreads) q[i] = float(p.q.at(number, query, head)[i]) * p.scale;
  float max = -INFINITY, total = 0.0f, sums[kColumns] = {};
  for (int key0 = 0; key0 < seen; key0 += kThreads) {
    __syncthreads();  // q has arrived, and all are done with the previous exponentials
    const int key = key0 + threadIdx.x;
    float score = -INFINITY;
    if (key < seen) {
      const T* row = p.key_at(number, key);
      score = 0.0f;
      for (int i = 0; i < kRow; ++i) score = fmaf(q[i], float(row[i]), score);
    }
    const float highest = fmaxf(max, reduce_row<Max>(score, of_max));
    const float rescale = exp2_approx((max - highest) * kLog2E);
    max = highest;
    exponentials[threadIdx.x] = exp2_approx((score - highest) * kLog2E);
    total = total * rescale + reduce_row(exponentials[threadIdx.x], of_sum);  // has a barrier: the exponentials are written
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sums[i] *= rescale;
    for (int j = 0; j < min(kThreads, seen - key0); ++j) {
      const T* row = p.key_at(number, key0 + j) + threadIdx.x;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sums[i] = fmaf(exponentials[j], float(row[i * kThreads]), sums[i]);
    }
  }
  const float inverse = seen > 0 ? 1.0f / total : 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) p.out.at(number, query, head)[threadIdx.x + i * kThreads] = T(sums[i] * inverse);
}

template <typename T>
void launch(const Mla<T>& p) {
  STD_TORCH_CHECK(int64_t(p.batch) * p.new_tokens <= 65535, "mla_decode: v01_naive takes at most 65535 queries of a head");
  naive<<<dim3(p.heads, p.batch * p.new_tokens), kThreads, 0, p.stream>>>(p);
}

}  // namespace minfer

MINFER_MLA_DECODE(mla_decode_v01_naive, minfer::launch)
