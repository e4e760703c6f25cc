// cpu_naive: a token at a time, its k experts one after the other, sums and what lies between in float32; threads over tokens.
// Idea: the definition on a CPU, for comparison; weights are read once for each slot, each operand converted from half.
// Expected: about 1 GFLOP/s a core, bound by the conversions: 10 ms a slot at hidden 2048 and ffn 768.
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "moe_ffn.h"

namespace minfer {

// The dot product, in fp32.
template <typename A, typename B>
float dot(const A* a, const B* b, int count) {
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) sum += static_cast<float>(a[i]) * static_cast<float>(b[i]);
  return sum;
}

template <typename T>
void add_token(const Experts<T>& p, int64_t token) {
  const T* x = p.x + token * p.ldx;
  std::vector<float> h(p.ffn), out(p.hidden);
  for (int64_t slot = token * p.k; slot < (token + 1) * p.k; ++slot) {
    const int64_t expert = p.indices[slot];
    if (expert < 0 || expert >= p.experts) continue;
    const T *gate = p.gate_up + expert * 2 * p.ffn * p.hidden, *up = gate + int64_t(p.ffn) * p.hidden;
    const T* down = p.down + expert * p.hidden * p.ffn;
    for (int64_t f = 0; f < p.ffn; ++f)
      h[f] = swiglu(dot(x, gate + f * p.hidden, p.hidden), dot(x, up + f * p.hidden, p.hidden));
    for (int64_t i = 0; i < p.hidden; ++i) out[i] += p.weights[slot] * dot(h.data(), down + i * p.ffn, p.ffn);
  }
  for (int64_t i = 0; i < p.hidden; ++i) p.out[token * p.ldo + i] = static_cast<T>(out[i]);
}

template <typename T>
void launch(const Experts<T>& p) {
  torch::stable::parallel_for(0, p.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) add_token(p, token);
  });
}

}  // namespace minfer

MINFER_MOE_FFN(moe_ffn_cpu_naive, minfer::launch)
