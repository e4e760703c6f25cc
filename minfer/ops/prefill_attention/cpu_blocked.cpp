// cpu_blocked: online softmax over blocks of keys that are widened to float32 once for several queries, in loops over
// columns that the compiler makes vectors of.
// Idea: keys lie transposed, so that a query's scores of a block are sums of vectors; a task has 16 queries of one head,
// whose blocks of k and v stay in the L1 and L2.
// Expected: ten times cpu_naive or more, whose every multiply-add converts a half and whose scores are one sum each.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "ops/halves.h"
#include "prefill_attention.h"

namespace minfer {

constexpr int kRows = 16, kKeys = 64;

struct Buffers {
  std::vector<float> q, k, v, sums;  // [row][dim], [dim][key], [key][v_dim], [row][v_dim]
  Buffers(int dim, int v_dim) : q(kRows * dim), k(kKeys * dim), v(kKeys * v_dim), sums(kRows * v_dim) {}
};

// Replaces a query's scores of a block of keys by exponentials relative to `max`, which may grow. Returns the factor that
// rescales the query's earlier sums and total.
inline float add(float* scores, const Span& seen, float& max, float& total) {
  float highest = max;
  for (int j = seen.begin; j < seen.end; ++j) highest = scores[j] > highest ? scores[j] : highest;
  const float rescale = std::exp(max - highest);
  float sum = 0.0f;
  for (int j = seen.begin; j < seen.end; ++j) sum += scores[j] = std::exp(scores[j] - highest);
  max = highest, total = total * rescale + sum;
  return rescale;
}

template <typename P>
void attend(const P& p, int number, const Sequence& s, int row0, int head, Buffers& b) {
  using T = typename P::Element;
  const int rows = std::min(kRows, p.rows(s) - row0), live = std::min(rows, s.queries - row0), dim = p.dim, v_dim = p.v_dim;
  const int kv_head = p.kv_head(head), begin = p.span(s, row0).begin, end = live > 0 ? p.span(s, row0 + live - 1).end : 0;
  float max[kRows], total[kRows] = {};
  std::fill_n(max, kRows, -INFINITY);
  std::fill(b.sums.begin(), b.sums.end(), 0.0f);
  for (int i = 0; i < live; ++i) {
    const T* q = p.q.at(number, s.first_q + row0 + i, head);
    for (int d = 0; d < dim; ++d) b.q[i * dim + d] = widen(q[d]) * p.scale;
  }
  for (int key0 = begin; key0 < end; key0 += kKeys) {
    const int keys = std::min(kKeys, end - key0);
    for (int j = 0; j < keys; ++j) {
      const T* k = p.k_at(number, s, key0 + j, kv_head);
      const T* v = p.v_at(number, s, key0 + j, kv_head);
      for (int d = 0; d < dim; ++d) b.k[d * kKeys + j] = widen(k[d]);
      for (int d = 0; d < v_dim; ++d) b.v[j * v_dim + d] = widen(v[d]);
    }
    for (int i = 0; i < live; ++i) {
      const Span span = p.span(s, row0 + i);
      const Span seen = {std::max(span.begin - key0, 0), std::min(span.end - key0, keys)};
      if (seen.begin >= seen.end) continue;
      float scores[kKeys] = {};
      for (int d = 0; d < dim; ++d) {
        const float q = b.q[i * dim + d];
        const float* __restrict__ k = &b.k[d * kKeys];
        for (int j = 0; j < kKeys; ++j) scores[j] += q * k[j];
      }
      if (p.softcap > 0.0f)
        for (int j = seen.begin; j < seen.end; ++j) scores[j] = p.softcap * std::tanh(scores[j] / p.softcap);
      const float rescale = add(scores, seen, max[i], total[i]);
      float* __restrict__ sums = &b.sums[i * v_dim];
      for (int d = 0; d < v_dim; ++d) sums[d] *= rescale;
      for (int j = seen.begin; j < seen.end; ++j) {
        const float* __restrict__ v = &b.v[j * v_dim];
        for (int d = 0; d < v_dim; ++d) sums[d] += scores[j] * v[d];
      }
    }
  }
  for (int i = 0; i < rows; ++i) {
    T* out = p.out.at(number, s.first_q + row0 + i, head);
    const float inverse = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;
    for (int d = 0; d < v_dim; ++d) out[d] = narrow<T>(b.sums[i * v_dim + d] * inverse);
    if (p.lse) *p.lse_at(number, s, row0 + i, head) = total[i] > 0.0f ? max[i] + std::log(total[i]) : -INFINITY;
  }
}

template <typename P>
void launch(const P& p) {
  for (int number = 0; number < p.batch; ++number) {
    const Sequence s = p.sequence(number);
    const int blocks = (p.rows(s) + kRows - 1) / kRows;
    torch::stable::parallel_for(0, int64_t(blocks) * p.heads, 1, [&](int64_t begin, int64_t end) {
      Buffers buffers(p.dim, p.v_dim);
      for (int64_t i = begin; i < end; ++i)
        attend(p, number, s, static_cast<int>(i % blocks) * kRows, static_cast<int>(i / blocks), buffers);
    });
  }
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_cpu_blocked, minfer::launch)
MINFER_PAGED_PREFILL_ATTENTION(prefill_attention_cpu_blocked_paged, minfer::launch)
