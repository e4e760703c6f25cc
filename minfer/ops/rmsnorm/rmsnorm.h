// What every CUDA and C++ rmsnorm kernel is given, and how it becomes a torch op.
//
// y = x / sqrt(mean(x^2) + eps) * weight for each row (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019),
// with sums and products in fp32 and one rounding, of y.
//
// A kernel file defines `template <typename T> void launch(const RmsNorm<T>&)` and ends with
// `MINFER_RMSNORM(rmsnorm_<file name>, launch)`. T is float or a half type.
#pragma once

#include "ops/op.h"

namespace minfer {

// Rows of y and x are contiguous and their strides, in elements, may exceed `hidden`.
template <typename T>
struct RmsNorm {
  T* y;
  const T* x;
  const T* weight;
  int tokens, hidden;
  int64_t y_stride, x_stride;
  float share;  // 1 / hidden
  float eps;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

// Throws unless rows can be read and written 16 bytes at a time.
template <typename T>
void require_vectors(const RmsNorm<T>& p) {
  check_pieces(p.y, p.hidden, p.y_stride, "rmsnorm: y");
  check_pieces(p.x, p.hidden, p.x_stride, "rmsnorm: x");
  check_pieces(p.weight, p.hidden, p.hidden, "rmsnorm: weight");
}

template <typename T>
RmsNorm<T> make_rmsnorm(const Tensor& y, const Tensor& x, const Tensor& weight, double eps) {
  check_rank(x, "rmsnorm: x", 2);
  const int64_t tokens = x.size(0), hidden = x.size(1);
  check_sizes(y, "rmsnorm: y", {tokens, hidden});
  check_sizes(weight, "rmsnorm: weight", {hidden});
  check_rows(y, "rmsnorm: y");
  check_rows(x, "rmsnorm: x");
  check_rows(weight, "rmsnorm: weight");

  RmsNorm<T> p;
  p.y = output<T>(y, "rmsnorm: y");
  p.x = input<T>(x, "rmsnorm: x");
  p.weight = input<T>(weight, "rmsnorm: weight");
  p.tokens = to_int(tokens, "rmsnorm: x"), p.hidden = to_int(hidden, "rmsnorm: x");
  p.y_stride = tokens > 1 ? y.stride(0) : hidden, p.x_stride = tokens > 1 ? x.stride(0) : hidden;
  p.share = 1.0f / static_cast<float>(hidden), p.eps = static_cast<float>(eps);
#ifdef __CUDACC__
  p.stream = stream_of(x);
#endif
  return p;
}

// Calls launch(RmsNorm<T>) with the T of the tensors; an empty output is no work.
template <typename Launch>
void dispatch(const Tensor& y, const Tensor& x, const Tensor& weight, double eps, Launch launch) {
  if (y.numel() == 0) return;
  dispatch<float, Half, BFloat16>(x.scalar_type(), "rmsnorm: x",
                                  [&]<typename T>() { launch(make_rmsnorm<T>(y, x, weight, eps)); });
  check_launch();
}

}  // namespace minfer

#define MINFER_RMSNORM(NAME, LAUNCH)                                                                        \
  static void NAME(minfer::Tensor y, const minfer::Tensor x, const minfer::Tensor weight, double eps) {     \
    minfer::dispatch(y, x, weight, eps, [](const auto& p) { LAUNCH(p); });                                  \
  }                                                                                                         \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor x, Tensor weight, float eps=1e-6) -> ()")
