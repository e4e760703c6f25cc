// cpu_naive: the definition in two loops a token, over heads and pairs; threads over the tokens.
// Idea: the definition on a CPU, for comparison.
// Expected: bound by the conversions of half types, one at a time, to about 1 GB/s a core.
#include <torch/csrc/stable/ops.h>

#include "rope.h"

namespace minfer {

struct Naive {
  template <bool kBackward, bool kInterleaved, typename T>
  static void run(const Rope<T>& p) {
    torch::stable::parallel_for(0, int64_t(p.batch) * p.seq, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int batch = static_cast<int>(i / p.seq), token = static_cast<int>(i % p.seq);
        const int row = p.position(batch, token);
        for (int head = 0; head < p.all_heads(); ++head)
          p.with_head(batch, token, head, [&](const T* from, T* to) {
            for (int pair = 0; pair < p.half; ++pair) {
              const int first = kInterleaved ? 2 * pair : pair, second = kInterleaved ? first + 1 : pair + p.half;
              float a = static_cast<float>(from[first]), b = static_cast<float>(from[second]);
              const float cos = !p.has_row(row) ? NAN : p.cos[row * p.cos_stride + pair];
              const float sin = !p.has_row(row) ? NAN : p.sin[row * p.sin_stride + pair];
              rotate_pair(a, b, cos, kBackward ? -sin : sin);
              to[first] = static_cast<T>(a), to[second] = static_cast<T>(b);
            }
            for (int rest = 2 * p.half; rest < p.dim && !p.in_place; ++rest) to[rest] = from[rest];
          });
      }
    });
  }
};

}  // namespace minfer

MINFER_ROPE(rope_cpu_naive, minfer::Naive)
