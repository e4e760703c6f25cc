// What every CUDA and C++ kernel of `producer_consumer` is given, and how it becomes a torch op.
//
// A kernel file defines `void launch(const Stream&)` and ends with `MINFER_STREAM(producer_consumer_<file name>, launch)`.
#pragma once

#include "ops/op.h"

namespace minfer {

constexpr float kRate = 1.0f / 256;

struct Stream {
  float* y;
  const float* x;
  int n, steps;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

inline Stream make_stream(const Tensor& y, const Tensor& x, int64_t steps) {
  check_rank(x, "producer_consumer: x", 1);
  check_sizes(y, "producer_consumer: y", {x.size(0)});
  check_contiguous(x, "producer_consumer: x");
  check_contiguous(y, "producer_consumer: y");
  Stream s;
  s.y = output<float>(y, "producer_consumer: y");
  s.x = input<float>(x, "producer_consumer: x");
  s.n = to_int(x.size(0), "producer_consumer: x"), s.steps = to_int(steps, "producer_consumer: steps");
#ifdef __CUDACC__
  s.stream = stream_of(x);
#endif
  return s;
}

}  // namespace minfer

#define MINFER_STREAM(NAME, LAUNCH)                                                    \
  static void NAME(minfer::Tensor y, const minfer::Tensor x, int64_t steps) {          \
    if (y.numel() == 0) return;                                                        \
    LAUNCH(minfer::make_stream(y, x, steps));                                          \
    minfer::check_launch();                                                            \
  }                                                                                    \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor x, int steps=64) -> ()")
