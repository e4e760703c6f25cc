// cpu_vectors: pieces of 32 pairs, copied to fp32 and back, so that the compiler makes vectors of every loop; threads over
// the tokens.
// Idea: a piece lies in arrays of its own, so that nothing it is made of can be what is written, and the conversions of half
// types are integer arithmetic, for which there are vector instructions.
// Expected: three times cpu_naive or more, and the speed of memory with a few cores.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "ops/halves.h"
#include "rope.h"

namespace minfer {

constexpr int kPiece = 32;  // pairs

// `count` pairs, from element `first` and from `second` on; interleaved pairs all lie from `first` on.
template <bool kBackward, bool kInterleaved, typename T>
void rotate_piece(const T* from, T* to, int first, int second, const float* cos, const float* sin, int count) {
  float a[kPiece], b[kPiece];
  for (int i = 0; i < count; ++i) {
    a[i] = widen(from[kInterleaved ? first + 2 * i : first + i]);
    b[i] = widen(from[kInterleaved ? first + 2 * i + 1 : second + i]);
  }
  for (int i = 0; i < count; ++i) rotate_pair(a[i], b[i], cos[i], kBackward ? -sin[i] : sin[i]);
  for (int i = 0; i < count; ++i) {
    to[kInterleaved ? first + 2 * i : first + i] = narrow<T>(a[i]);
    to[kInterleaved ? first + 2 * i + 1 : second + i] = narrow<T>(b[i]);
  }
}

struct Vectors {
  template <bool kBackward, bool kInterleaved, typename T>
  static void run(const Rope<T>& p) {
    float none[kPiece];  // of a position that the tables do not have
    std::fill(none, none + kPiece, NAN);
    const int64_t tokens = 1 + 8192 / (int64_t(p.all_heads()) * p.dim);  // of a task, at least
    torch::stable::parallel_for(0, int64_t(p.batch) * p.seq, tokens, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int batch = static_cast<int>(i / p.seq), token = static_cast<int>(i % p.seq);
        const int row = p.position(batch, token);
        for (int head = 0; head < p.all_heads(); ++head)
          p.with_head(batch, token, head, [&](const T* from, T* to) {
            for (int pair = 0; pair < p.half; pair += kPiece) {
              const float* cos = !p.has_row(row) ? none : p.cos + row * p.cos_stride + pair;
              const float* sin = !p.has_row(row) ? none : p.sin + row * p.sin_stride + pair;
              const int first = kInterleaved ? 2 * pair : pair, left = p.half - pair;
              const auto rotate = rotate_piece<kBackward, kInterleaved, T>;
              if (left >= kPiece) rotate(from, to, first, p.half + pair, cos, sin, kPiece);  // a count the compiler knows
              else rotate(from, to, first, p.half + pair, cos, sin, left);
            }
            if (!p.in_place) std::copy(from + 2 * p.half, from + p.dim, to + 2 * p.half);
          });
      }
    });
  }
};

}  // namespace minfer

MINFER_ROPE(rope_cpu_vectors, minfer::Vectors)
