// cpu_naive: for each query and head the scores of the keys that it sees, their softmax, and its product with v, in float32.
// Idea: the definition on a CPU; a page is looked up once for each key; threads over sequences, queries and heads.
// Expected: about 1 GFLOP/s a core, bound by the conversions from half at each use.
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>

#include <vector>

#include "decode_attention.h"
#include "ops/halves.h"

namespace minfer {

inline float widen(Float8E4M3 value) {
  using Fp8 = torch::headeronly::Float8_e4m3fn;
  return Fp8(static_cast<uint8_t>(value), Fp8::from_bits());
}

template <typename T, typename KV>
void attend(const Decode<T, KV>& p, int number, int query, int head, std::vector<float>& scores) {
  const int keys = p.keys(number), seen = p.seen(query, keys), kv_head = head / p.group();
  const T* q = p.q.at(number, query, head);
  std::vector<float> sums(p.v_dim());
  float max = -INFINITY, sum = 0.0f;
  for (int key = 0; key < seen; ++key) {
    const KV* k = p.k.at(p.block_of(number, key), p.slot_of(key), kv_head);
    float score = 0.0f;
    for (int i = 0; i < p.dim; ++i) score += widen(q[i]) * widen(k[i]);
    scores[key] = score * (p.scale * p.scale_of_k());
    max = scores[key] > max ? scores[key] : max;
  }
  for (int key = 0; key < seen; ++key) {
    const KV* v = p.v.at(p.block_of(number, key), p.slot_of(key), kv_head);
    const float power = std::exp(scores[key] - max);
    sum += power;
    for (int i = 0; i < p.v_dim(); ++i) sums[i] += power * widen(v[i]);
  }
  T* out = p.out.at(number, query, head);
  for (int i = 0; i < p.v_dim(); ++i) out[i] = static_cast<T>(seen > 0 ? sums[i] * p.scale_of_v() / sum : 0.0f);
}

template <typename T, typename KV>
void launch(const Decode<T, KV>& p) {
  const int of_sequence = p.new_tokens * p.heads;
  torch::stable::parallel_for(0, int64_t(p.batch) * of_sequence, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(p.most);
    for (int64_t i = begin; i < end; ++i) {
      const int number = static_cast<int>(i / of_sequence), rest = static_cast<int>(i % of_sequence);
      attend(p, number, rest / p.heads, rest % p.heads, scores);
    }
  });
}

}  // namespace minfer

MINFER_DECODE_ATTENTION(decode_attention_cpu_naive, minfer::launch)
