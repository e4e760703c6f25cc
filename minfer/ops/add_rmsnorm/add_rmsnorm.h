// What every CUDA and C++ add_rmsnorm kernel is given, and how it becomes a torch op.
//
// residual += x, rounded once, and y = residual / sqrt(mean(residual^2) + eps) * weight for each row (Zhang and Sennrich,
// "Root Mean Square Layer Normalization", 2019), with sums and products in fp32 and one rounding, of y.
//
// A kernel file defines `template <typename T> void launch(const AddRmsNorm<T>&)` and ends with
// `MINFER_ADD_RMSNORM(add_rmsnorm_<file name>, launch)`. T is float or a half type.
#pragma once

#include "ops/op.h"

namespace minfer {

// Rows are contiguous and their strides, in elements, may exceed `hidden`.
template <typename T>
struct AddRmsNorm {
  T* y;
  T* residual;
  const T* x;
  const T* weight;
  int tokens, hidden;
  int64_t y_stride, residual_stride, x_stride;
  float share;  // 1 / hidden
  float eps;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

// Throws unless rows can be read and written 16 bytes at a time.
template <typename T>
void require_vectors(const AddRmsNorm<T>& p) {
  check_pieces(p.y, p.hidden, p.y_stride, "add_rmsnorm: y");
  check_pieces(p.residual, p.hidden, p.residual_stride, "add_rmsnorm: residual");
  check_pieces(p.x, p.hidden, p.x_stride, "add_rmsnorm: x");
  check_pieces(p.weight, p.hidden, p.hidden, "add_rmsnorm: weight");
}

template <typename T>
AddRmsNorm<T> make_add_rmsnorm(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& weight,
                               double eps) {
  check_rank(x, "add_rmsnorm: x", 2);
  const int64_t tokens = x.size(0), hidden = x.size(1);
  check_sizes(y, "add_rmsnorm: y", {tokens, hidden});
  check_sizes(residual, "add_rmsnorm: residual", {tokens, hidden});
  check_sizes(weight, "add_rmsnorm: weight", {hidden});
  check_rows(y, "add_rmsnorm: y");
  check_rows(residual, "add_rmsnorm: residual");
  check_rows(x, "add_rmsnorm: x");
  check_rows(weight, "add_rmsnorm: weight");

  AddRmsNorm<T> p;
  p.y = output<T>(y, "add_rmsnorm: y");
  p.residual = output<T>(residual, "add_rmsnorm: residual");
  p.x = input<T>(x, "add_rmsnorm: x");
  p.weight = input<T>(weight, "add_rmsnorm: weight");
  p.tokens = to_int(tokens, "add_rmsnorm: x"), p.hidden = to_int(hidden, "add_rmsnorm: x");
  p.y_stride = tokens > 1 ? y.stride(0) : hidden, p.x_stride = tokens > 1 ? x.stride(0) : hidden;
  p.residual_stride = tokens > 1 ? residual.stride(0) : hidden;
  p.share = 1.0f / static_cast<float>(hidden), p.eps = static_cast<float>(eps);
#ifdef __CUDACC__
  p.stream = stream_of(x);
#endif
  return p;
}

// Calls launch(AddRmsNorm<T>) with the T of the tensors; an empty output is no work.
template <typename Launch>
void dispatch(const Tensor& y, const Tensor& residual, const Tensor& x, const Tensor& weight, double eps,
              Launch launch) {
  if (y.numel() == 0) return;
  dispatch<float, Half, BFloat16>(x.scalar_type(), "add_rmsnorm: x",
                                  [&]<typename T>() { launch(make_add_rmsnorm<T>(y, residual, x, weight, eps)); });
  check_launch();
}

}  // namespace minfer

#define MINFER_ADD_RMSNORM(NAME, LAUNCH)                                                                           \
  static void NAME(minfer::Tensor y, minfer::Tensor residual, const minfer::Tensor x, const minfer::Tensor weight, \
                   double eps) {                                                                                   \
    minfer::dispatch(y, residual, x, weight, eps, [](const auto& p) { LAUNCH(p); });                               \
  }                                                                                                                \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor(b!) residual, Tensor x, Tensor weight, float eps=1e-6) -> ()")
