// cpu_heads: one head after the other, threads over the tokens.
// Idea: a head is widened once, and normalised and rotated in fp32 in an array of its own, so that the compiler makes vectors of
// the loops.
// Expected: the speed of memory with a few cores.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "ops/halves.h"
#include "rope_append.h"

namespace minfer {

template <typename T>
void write_head(const RopeAppend<T>& p, const T* from, T* to, const T* weight, int row, float* head) {
  for (int i = 0; i < p.dim; ++i) head[i] = widen(from[i]);
  if (weight != nullptr) {
    float sum = 0.0f;
    for (int i = 0; i < p.dim; ++i) sum += head[i] * head[i];
    const float scale = 1.0f / std::sqrt(sum * p.share + p.eps);
    for (int i = 0; i < p.dim; ++i) head[i] *= scale * widen(weight[i]);
  }
  float *a = head, *b = head + p.half;
  if (p.has_row(row)) {
    const float *cos = p.cos + row * p.cos_stride, *sin = p.sin + row * p.sin_stride;
    for (int i = 0; i < p.half; ++i) {
      const float before = a[i];
      a[i] = before * cos[i] - b[i] * sin[i];
      b[i] = b[i] * cos[i] + before * sin[i];
    }
  } else {
    std::fill(head, head + 2 * p.half, NAN);
  }
  for (int i = 0; i < p.dim; ++i) to[i] = narrow<T>(head[i]);
}

template <typename T>
void launch(const RopeAppend<T>& p) {
  const int64_t tokens = 1 + 8192 / (int64_t(p.all_heads()) * p.dim);  // of a task, at least
  torch::stable::parallel_for(0, p.tokens, tokens, [&](int64_t begin, int64_t end) {
    std::vector<float> values(p.dim);
    for (int token = static_cast<int>(begin); token < end; ++token) {
      for (int head = 0; head < p.all_heads(); ++head) {
        const T* from = p.from(token, head);
        T* to = p.to(token, head, p.where[token]);
        if (to == nullptr) continue;
        if (p.part(head) == Part::v) std::copy(from, from + p.dim, to);
        else write_head(p, from, to, p.weights[p.part(head) == Part::k], p.positions[token], values.data());
      }
    }
  });
}

}  // namespace minfer

MINFER_ROPE_APPEND(rope_append_cpu_heads, minfer::launch)
