// v01_naive: a block for a query head of a sequence: scores of 128 keys at a time, a thread each, online softmax, fp32 FMA.
// Idea: the definition, within one block: q and the exponentials of 128 keys lie in shared memory.
// Expected: far from the memory's speed. A batch of one has 32 blocks for 132 SMs; each thread reads the row of its key alone,
// so that a load of a warp touches 32 rows; and each query head of a group reads the same keys again.
#include "cuda/softmax.cuh"
#include "elements.cuh"

namespace minfer {

constexpr int kThreads = 128, kMostDim = 256;

template <typename T, typename KV>
__global__ void __launch_bounds__(kThreads) naive(Decode<T, KV> p, int v_dim) {
  __shared__ float q[kMostDim];
  __shared__ float exponentials[kThreads];
  __shared__ float of_max[kThreads / 32];
  __shared__ float of_sum[kThreads / 32];
  const int head = blockIdx.x, number = blockIdx.y / p.new_tokens, query = blockIdx.y % p.new_tokens;
  const int kv_head = head / p.group(), seen = p.seen(query, p.keys(number));  //@ seen
  for (int i = threadIdx.x; i < p.dim; i += kThreads) q[i] = float(p.q.at(number, query, head)[i]) * p.scale * p.scale_of_k();
  float max = -INFINITY, total = 0.0f, sums[kMostDim / kThreads] = {};
  for (int key0 = 0; key0 < seen; key0 += kThreads) {
    __syncthreads();  // q has arrived, and all are done with the previous exponentials  //@ q_arrived
    const int key = key0 + threadIdx.x;
    float score = -INFINITY;
    if (key < seen) {
      const KV* k = p.k.at(p.block_of(number, key), p.slot_of(key), kv_head);
      score = 0.0f;
      for (int i = 0; i < p.dim; ++i) score = fmaf(q[i], to_float(k[i]), score);
    }
    const float highest = fmaxf(max, reduce_row<Max>(score, of_max));
    const float rescale = exp2_approx((max - highest) * kLog2E);
    max = highest;
    exponentials[threadIdx.x] = exp2_approx((score - highest) * kLog2E);
    total = total * rescale + reduce_row(exponentials[threadIdx.x], of_sum);  // has a barrier: the exponentials are written
#pragma unroll  // registers have no index at run time
    for (int i = 0; i < kMostDim / kThreads; ++i) {
      const int column = threadIdx.x + i * kThreads;
      if (column >= v_dim) continue;
      sums[i] *= rescale;
      for (int j = 0; j < min(kThreads, seen - key0); ++j)
        sums[i] += exponentials[j] * to_float(p.v.at(p.block_of(number, key0 + j), p.slot_of(key0 + j), kv_head)[column]);
    }
  }
  const float inverse = seen > 0 ? p.scale_of_v() / total : 0.0f;
#pragma unroll
  for (int i = 0; i < kMostDim / kThreads; ++i)
    if (const int column = threadIdx.x + i * kThreads; column < v_dim)
      p.out.at(number, query, head)[column] = T(sums[i] * inverse);
}

template <typename T, typename KV>
void launch(const Decode<T, KV>& p) {
  STD_TORCH_CHECK(int64_t(p.batch) * p.new_tokens <= 65535, "decode_attention: v01_naive takes at most 65535 queries of a head");
  naive<<<dim3(p.heads, p.batch * p.new_tokens), kThreads, 0, p.stream>>>(p, p.v_dim());
}

}  // namespace minfer

MINFER_DECODE_ATTENTION(decode_attention_v01_naive, minfer::launch)
