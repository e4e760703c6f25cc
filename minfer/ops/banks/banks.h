// What every CUDA and C++ kernel of `banks` is given, and how it becomes a torch op.
//
// A kernel file defines `void launch(const Exchange&)` and ends with `MINFER_BANKS(banks_<name>, launch)`.
#pragma once

#include "ops/op.h"

namespace minfer {

constexpr int kLanes = 32, kMostStride = 32;
constexpr int kAcross = 16;  // lanes from the one that stores a piece to the one that loads it

struct Exchange {
  float* y;
  const float* x;
  int rows, words;  // words of a piece: 1, 2 or 4
  int stride, rounds;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

inline Exchange make_exchange(const Tensor& y, const Tensor& x, int64_t stride, int64_t rounds) {
  check_rank(x, "banks: x", 2);
  const int64_t words = x.size(1) / kLanes;
  STD_TORCH_CHECK((words == 1 || words == 2 || words == 4) && words * kLanes == x.size(1),
                  "banks: x must have 32 pieces of 1, 2 or 4 words in a row, got ", x.size(1), " words");
  STD_TORCH_CHECK(stride >= words && stride <= kMostStride && stride % words == 0,
                  "banks: stride must be a multiple of a piece's ", words, " words, up to ", kMostStride, ", got ", stride);
  check_sizes(y, "banks: y", {x.size(0), x.size(1)});
  check_contiguous(x, "banks: x");
  check_contiguous(y, "banks: y");

  Exchange e;
  e.y = output<float>(y, "banks: y");
  e.x = input<float>(x, "banks: x");
  check_pieces(e.x, x.size(1), x.size(1), "banks: x", 4 * words);
  check_pieces(e.y, x.size(1), x.size(1), "banks: y", 4 * words);
  e.rows = to_int(x.size(0), "banks: x"), e.words = static_cast<int>(words);
  e.stride = static_cast<int>(stride), e.rounds = to_int(rounds, "banks: rounds");
#ifdef __CUDACC__
  e.stream = stream_of(x);
#endif
  return e;
}

}  // namespace minfer

#define MINFER_BANKS(NAME, LAUNCH)                                                                            \
  static void NAME(minfer::Tensor y, const minfer::Tensor x, int64_t stride, int64_t rounds) {                \
    if (y.numel() == 0) return;                                                                               \
    LAUNCH(minfer::make_exchange(y, x, stride, rounds));                                                      \
    minfer::check_launch();                                                                                   \
  }                                                                                                           \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor x, int stride=1, int rounds=257) -> ()")
