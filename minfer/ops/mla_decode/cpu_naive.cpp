// cpu_naive: computes, for each query and head, the scores of the keys that it sees, their softmax, and its product with the
// latents, in float32.
// Idea: the definition on a CPU. Threads share sequences, queries and heads; a page is looked up once for each key.
// Expected: about 1 GFLOP/s a core, because each use of an element converts it from half.
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <vector>

#include "mla_decode.h"
#include "ops/halves.h"

namespace minfer {

template <typename T>
void attend(const Mla<T>& p, int number, int query, int head, std::vector<float>& scores) {
  const int seen = p.seen(query, p.keys(number));
  const T* q = p.q.at(number, query, head);
  float sums[kLatent] = {}, max = -INFINITY, sum = 0.0f;
  for (int key = 0; key < seen; ++key) {
    const T* row = p.key_at(number, key);
    float score = 0.0f;
    for (int i = 0; i < kRow; ++i) score += widen(q[i]) * widen(row[i]);
    scores[key] = score * p.scale;
    max = scores[key] > max ? scores[key] : max;
  }
  for (int key = 0; key < seen; ++key) {
    const T* row = p.key_at(number, key);
    const float power = std::exp(scores[key] - max);
    sum += power;
    for (int i = 0; i < kLatent; ++i) sums[i] += power * widen(row[i]);
  }
  T* out = p.out.at(number, query, head);
  for (int i = 0; i < kLatent; ++i) out[i] = static_cast<T>(seen > 0 ? sums[i] / sum : 0.0f);
}

template <typename T>
void launch(const Mla<T>& p) {
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

MINFER_MLA_DECODE(mla_decode_cpu_naive, minfer::launch)
