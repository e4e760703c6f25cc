// cpu_scored: cpu_naive with a window of keys, a soft cap, sinks, a tree of new tokens and pages of any power of two.
// Idea: keys that a query does not see are not read. A sink adds one exponential to the denominator.
// Expected: cpu_naive's speed for the keys that are seen.
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>

#include <vector>

#include "ops/halves.h"
#include "scored.h"

namespace minfer {

inline float widen(Float8E4M3 value) {
  using Fp8 = torch::headeronly::Float8_e4m3fn;
  return Fp8(static_cast<uint8_t>(value), Fp8::from_bits());
}

template <typename T, typename KV>
void attend(const Decode<T, KV>& p, const Scoring& scoring, int number, int query, int head, std::vector<float>& scores) {
  // A query of a tree may see new tokens behind its own; one at a negative position sees no key.
  const int keys = p.keys(number), own = p.seen(query, keys), seen = own > 0 ? keys : 0;
  const int first = scoring.first(own), kv_head = head / p.group();
  const unsigned mask = scoring.seen_new(p, number, query);
  const T* q = p.q.at(number, query, head);
  std::vector<float> sums(p.v_dim());
  float max = scoring.sinks ? scoring.sinks[head] : -INFINITY;
  for (int key = first; key < seen; ++key) {
    if (!is_seen(p, keys, mask, key)) continue;
    const KV* k = p.k.at(p.block_of(number, key), p.slot_of(key), kv_head);
    float score = 0.0f;
    for (int i = 0; i < p.dim; ++i) score += widen(q[i]) * widen(k[i]);
    score *= p.scale * p.scale_of_k();
    if (scoring.softcap > 0) score = scoring.softcap * std::tanh(score / scoring.softcap);
    scores[key] = score;
    max = score > max ? score : max;
  }
  float sum = scoring.sinks ? std::exp(scoring.sinks[head] - max) : 0.0f;
  bool visible = false;
  for (int key = first; key < seen; ++key) {
    if (!is_seen(p, keys, mask, key)) continue;
    visible = true;
    const KV* v = p.v.at(p.block_of(number, key), p.slot_of(key), kv_head);
    const float power = std::exp(scores[key] - max);
    sum += power;
    for (int i = 0; i < p.v_dim(); ++i) sums[i] += power * widen(v[i]);
  }
  T* out = p.out.at(number, query, head);
  for (int i = 0; i < p.v_dim(); ++i) out[i] = static_cast<T>(visible ? sums[i] * p.scale_of_v() / sum : 0.0f);
}

template <typename T, typename KV>
void launch(const Decode<T, KV>& p, const Scoring& scoring) {
  const int of_sequence = p.new_tokens * p.heads;
  torch::stable::parallel_for(0, int64_t(p.batch) * of_sequence, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(p.most);
    for (int64_t i = begin; i < end; ++i) {
      const int number = static_cast<int>(i / of_sequence), rest = static_cast<int>(i % of_sequence);
      attend(p, scoring, number, rest / p.heads, rest % p.heads, scores);
    }
  });
}

}  // namespace minfer

MINFER_SCORED_DECODE(decode_attention_cpu_scored, minfer::launch)
