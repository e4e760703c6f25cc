// What every CUDA and C++ layernorm kernel is given, and how it becomes a torch op.
//
// y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias for each row (Ba, Kiros and Hinton, "Layer Normalization", 2016).
// The variance is the mean of squared differences from the mean. Sums are fp32, and y is rounded once.
//
// A kernel file defines `template <typename T> void launch(const LayerNorm<T>&)` and ends with
// `MINFER_LAYERNORM(layernorm_<file name>, launch)`. T is float or a half type.
#pragma once

#include "ops/op.h"

namespace minfer {

// Rows of y and x are contiguous and their strides, in elements, may exceed `hidden`.
template <typename T>
struct LayerNorm {
  T* y;
  const T* x;
  const T* weight;
  const T* bias;
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
void require_vectors(const LayerNorm<T>& p) {
  check_pieces(p.y, p.hidden, p.y_stride, "layernorm: y");
  check_pieces(p.x, p.hidden, p.x_stride, "layernorm: x");
  check_pieces(p.weight, p.hidden, p.hidden, "layernorm: weight");
  check_pieces(p.bias, p.hidden, p.hidden, "layernorm: bias");
}

template <typename T>
LayerNorm<T> make_layernorm(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  check_rank(x, "layernorm: x", 2);
  const int64_t tokens = x.size(0), hidden = x.size(1);
  check_sizes(y, "layernorm: y", {tokens, hidden});
  check_sizes(weight, "layernorm: weight", {hidden});
  check_sizes(bias, "layernorm: bias", {hidden});
  check_rows(y, "layernorm: y");
  check_rows(x, "layernorm: x");
  check_rows(weight, "layernorm: weight");
  check_rows(bias, "layernorm: bias");

  LayerNorm<T> p;
  p.y = output<T>(y, "layernorm: y");
  p.x = input<T>(x, "layernorm: x");
  p.weight = input<T>(weight, "layernorm: weight");
  p.bias = input<T>(bias, "layernorm: bias");
  p.tokens = to_int(tokens, "layernorm: x"), p.hidden = to_int(hidden, "layernorm: x");
  p.y_stride = tokens > 1 ? y.stride(0) : hidden, p.x_stride = tokens > 1 ? x.stride(0) : hidden;
  p.share = 1.0f / static_cast<float>(hidden), p.eps = static_cast<float>(eps);
#ifdef __CUDACC__
  p.stream = stream_of(x);
#endif
  return p;
}

// Calls launch(LayerNorm<T>) with the T of the tensors; an empty output is no work.
template <typename Launch>
void dispatch(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, Launch launch) {
  if (y.numel() == 0) return;
  dispatch<float, Half, BFloat16>(x.scalar_type(), "layernorm: x",
                                  [&]<typename T>() { launch(make_layernorm<T>(y, x, weight, bias, eps)); });
  check_launch();
}

}  // namespace minfer

#define MINFER_LAYERNORM(NAME, LAUNCH)                                                                          \
  static void NAME(minfer::Tensor y, const minfer::Tensor x, const minfer::Tensor weight, const minfer::Tensor bias, \
                   double eps) {                                                                                \
    minfer::dispatch(y, x, weight, bias, eps, [](const auto& p) { LAUNCH(p); });                                \
  }                                                                                                             \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor x, Tensor weight, Tensor bias, float eps=1e-5) -> ()")
