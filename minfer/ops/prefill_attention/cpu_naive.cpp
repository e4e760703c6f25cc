// cpu_naive: for each query and head the scores of the keys that it sees, their softmax, and its product with v, in float32.
// Idea: the definition on a CPU; scores are kept for one row; threads over queries and heads.
// Expected: about 1 GFLOP/s a core, bound by the conversions from half at each use.
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "fp8_attention.h"
#include "ops/formats.h"

namespace minfer {

template <typename T>
float to_float(T x) {
  return static_cast<float>(x);
}
inline float to_float(Float8E4M3 x) { return from_e4m3(static_cast<uint8_t>(x)); }

// What keys and values are multiplied with.
struct Scales {
  float k, v;
};
template <typename P>
Scales scales_of(const P& p) {
  if constexpr (requires { p.scales; }) return {p.scales[0], p.scales[1]};
  else return {1.0f, 1.0f};
}

template <typename P>
void attend(const P& p, int number, const Sequence& s, int query, int head, std::vector<float>& scores) {
  using T = typename P::Element;
  T* out = p.out.at(number, s.first_q + query, head);
  const Span span = query < s.queries ? p.span(s, query) : Span{0, 0};
  std::vector<float> sums(p.v_dim);
  float max = -INFINITY, sum = 0.0f;
  const Scales scales = scales_of(p);
  for (int key = span.begin; key < span.end; ++key) {
    const T* q = p.q.at(number, s.first_q + query, head);
    const auto* k = p.k_at(number, s, key, p.kv_head(head));
    float score = 0.0f;
    for (int i = 0; i < p.dim; ++i) score += to_float(q[i]) * to_float(k[i]);
    score *= p.scale * scales.k;
    if (p.softcap > 0.0f) score = p.softcap * std::tanh(score / p.softcap);
    scores[key] = score;
    max = score > max ? score : max;
  }
  for (int key = span.begin; key < span.end; ++key) {
    const auto* v = p.v_at(number, s, key, p.kv_head(head));
    const float power = std::exp(scores[key] - max);
    sum += power;
    for (int i = 0; i < p.v_dim; ++i) sums[i] += power * to_float(v[i]);
  }
  for (int i = 0; i < p.v_dim; ++i) out[i] = static_cast<T>(span.begin < span.end ? sums[i] * scales.v / sum : 0.0f);
  if (p.lse) *p.lse_at(number, s, query, head) = span.begin < span.end ? max + std::log(sum) : -INFINITY;
}

template <typename P>
void launch(const P& p) {
  for (int number = 0; number < p.batch; ++number) {
    const Sequence s = p.sequence(number);
    torch::stable::parallel_for(0, int64_t(p.rows(s)) * p.heads, 4, [&](int64_t begin, int64_t end) {
      std::vector<float> scores(s.keys);
      for (int64_t i = begin; i < end; ++i)
        attend(p, number, s, static_cast<int>(i / p.heads), static_cast<int>(i % p.heads), scores);
    });
  }
}

}  // namespace minfer

MINFER_PREFILL_ATTENTION(prefill_attention_cpu_naive, minfer::launch)
MINFER_PAGED_PREFILL_ATTENTION(prefill_attention_cpu_naive_paged, minfer::launch)
MINFER_FP8_PREFILL_ATTENTION(prefill_attention_cpu_naive_fp8, minfer::launch)
