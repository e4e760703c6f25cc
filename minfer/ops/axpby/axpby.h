// What every CUDA and C++ axpby kernel is given, and how it becomes a torch op.
//
// y = alpha a + beta b in float32, with one multiplication and one fused multiply-add an element.
//
// A kernel file defines `void launch(const Axpby&)` and ends with `MINFER_AXPBY(axpby_<file name>, launch)`.
#pragma once

#include "ops/op.h"

namespace minfer {

struct Axpby {
  float* y;
  const float *a, *b;
  int64_t count;
  float alpha, beta;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

// Throws unless the tensors can be read and written 16 bytes at a time.
inline void require_vectors(const Axpby& p) {
  check_pieces(p.y, p.count, p.count, "axpby: y");
  check_pieces(p.a, p.count, p.count, "axpby: a");
  check_pieces(p.b, p.count, p.count, "axpby: b");
}

// Calls launch(Axpby); an empty output is no work.
template <typename Launch>
void call_axpby(const Tensor& y, const Tensor& a, const Tensor& b, double alpha, double beta, Launch launch) {
  check_rank(a, "axpby: a", 1);
  const int64_t count = a.size(0);
  check_sizes(y, "axpby: y", {count});
  check_sizes(b, "axpby: b", {count});
  check_contiguous(y, "axpby: y"), check_contiguous(a, "axpby: a"), check_contiguous(b, "axpby: b");
  Axpby p;
  p.y = output<float>(y, "axpby: y"), p.a = input<float>(a, "axpby: a"), p.b = input<float>(b, "axpby: b");
  p.count = to_int(count, "axpby: a");  // so that a grid of one block for 256 elements has a size that CUDA takes
  p.alpha = static_cast<float>(alpha), p.beta = static_cast<float>(beta);
#ifdef __CUDACC__
  p.stream = stream_of(a);
#endif
  if (count > 0) launch(p);
  check_launch();
}

}  // namespace minfer

#define MINFER_AXPBY(NAME, LAUNCH)                                                                                \
  static void NAME(minfer::Tensor y, const minfer::Tensor a, const minfer::Tensor b, double alpha, double beta) { \
    minfer::call_axpby(y, a, b, alpha, beta, LAUNCH);                                                             \
  }                                                                                                               \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor a, Tensor b, float alpha=1.0, float beta=1.0) -> ()")
