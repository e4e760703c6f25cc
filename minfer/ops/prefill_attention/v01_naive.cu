// v01_naive: three kernels: all scores to memory, their softmax in place, and its product with v.
// Idea: the definition, nothing else: a thread for a score, a block for a row's softmax, a thread for an element of out.
// Expected: a few hundred GFLOP/s: for each multiply-add a thread loads two half elements, from L2 at best, and tensor cores
// are idle. Scores are fp32, for as many heads at a time as fit 1 GB: one head at 16384 queries. They are written once and read
// three times.
#include <algorithm>

#include "cuda/counters.cuh"
#include "cuda/softmax.cuh"
#include "prefill_attention.h"

namespace minfer {

constexpr int kThreads = 128;
constexpr int64_t kMostScores = 1 << 28;

struct Row {
  int number;  // of the sequence; -1: a packed token of no sequence
  Sequence s;
  int query;
};

// The query of row `row` of the batch; in a padded batch it may lie behind its sequence's queries.
template <typename T>
__device__ Row row_of(const Attention<T>& p, int64_t row) {
  if (!p.packed) {
    const int number = static_cast<int>(row / p.seq_q);
    return {number, p.sequence(number), static_cast<int>(row % p.seq_q)};
  }
  for (int number = 0; number < p.batch; ++number) {
    const Sequence s = p.sequence(number);
    if (row >= s.first_q && row < s.first_q + s.queries) return {number, s, static_cast<int>(row - s.first_q)};
  }
  return {-1, {}, static_cast<int>(row)};
}

template <typename T>
__device__ Span span_of(const Attention<T>& p, const Row& r) {
  return r.number >= 0 && r.query < r.s.queries ? p.span(r.s, r.query) : Span{0, 0};
}

// scores[head][row][key], of the keys that a row sees.
template <typename T>
__global__ void __launch_bounds__(kThreads) score(Attention<T> p, float* scores, int head0) {
  const Row r = row_of(p, blockIdx.x);
  const Span span = span_of(p, r);
  const int key = blockIdx.y * kThreads + threadIdx.x, head = head0 + blockIdx.z;
  if (key < span.begin || key >= span.end) return;
  const T* q = p.q.at(r.number, r.s.first_q + r.query, head);
  const T* k = p.k.at(r.number, r.s.first_kv + key, p.kv_head(head));  //@ kv_head
  float sum = 0.0f;
  for (int i = 0; i < p.dim; ++i) sum += float(q[i]) * float(k[i]);
  sum *= p.scale;  //@ scale
  if (p.softcap > 0.0f) sum = p.softcap * tanh_by_exp2(sum / p.softcap);
  scores[(int64_t(blockIdx.z) * gridDim.x + blockIdx.x) * p.seq_kv + key] = sum;
}

// For each row: overwrites scores with exponentials, and computes their sum and the log-sum-exp.
template <typename T>
__global__ void __launch_bounds__(kThreads) normalise(Attention<T> p, float* scores, int head0) {
  __shared__ float of_max[kThreads / 32];
  __shared__ float of_sum[kThreads / 32];
  const Row r = row_of(p, blockIdx.x);
  const Span span = span_of(p, r);
  float* row = scores + (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * p.seq_kv;
  float most = -INFINITY, sum = 0.0f;
  for (int key = span.begin + threadIdx.x; key < span.end; key += kThreads) most = fmaxf(most, row[key]);
  most = reduce_row<Max>(most, of_max);
  const float base = base_of_row(most);
  for (int key = span.begin + threadIdx.x; key < span.end; key += kThreads) {
    row[key] = exp2_approx((row[key] - base) * kLog2E);
    sum += row[key];
  }
  sum = reduce_row(sum, of_sum);
  for (int key = span.begin + threadIdx.x; key < span.end; key += kThreads) row[key] /= sum;
  if (p.lse && threadIdx.x == 0)
    *p.lse_at(max(r.number, 0), r.s, r.query, head0 + blockIdx.y) = most + logf(sum);  // -inf where nothing is seen
}

template <typename T>
__global__ void __launch_bounds__(kThreads) product(Attention<T> p, const float* scores, int head0) {
  const Row r = row_of(p, blockIdx.x);
  const Span span = span_of(p, r);
  const int head = head0 + blockIdx.y, number = max(r.number, 0);
  const float* row = scores + (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * p.seq_kv;
  for (int i = threadIdx.x; i < p.v_dim; i += kThreads) {
    float sum = 0.0f;
    for (int key = span.begin; key < span.end; ++key)
      sum += row[key] * float(p.v.at(number, r.s.first_kv + key, p.kv_head(head))[i]);
    p.out.at(number, r.s.first_q + r.query, head)[i] = T(sum);
  }
}

template <typename T>
void launch(const Attention<T>& p) {
  const int64_t rows = (p.packed ? 1 : int64_t(p.batch)) * p.seq_q, of_head = std::max<int64_t>(rows * p.seq_kv, 1);
  STD_TORCH_CHECK(rows <= INT_MAX, "prefill_attention: more queries than a launch has blocks");
  const int most = static_cast<int>(std::clamp<int64_t>(kMostScores / of_head, 1, std::min(p.heads, 65535)));
  const int blocks = (p.seq_kv + kThreads - 1) / kThreads;
  STD_TORCH_CHECK(blocks <= 65535, "prefill_attention: v01_naive takes at most ", 65535 * kThreads, " keys");
  const Tensor memory = scratch_words(most * of_head);
  float* scores = static_cast<float*>(memory.mutable_data_ptr());
  for (int head0 = 0; head0 < p.heads; head0 += most) {
    const unsigned heads = std::min(most, p.heads - head0), row_blocks = static_cast<unsigned>(rows);
    if (blocks > 0) score<<<dim3(row_blocks, blocks, heads), kThreads, 0, p.stream>>>(p, scores, head0);
    normalise<<<dim3(row_blocks, heads), kThreads, 0, p.stream>>>(p, scores, head0);
    product<<<dim3(row_blocks, heads), kThreads, 0, p.stream>>>(p, scores, head0);
  }
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_v01_naive, minfer::launch)
