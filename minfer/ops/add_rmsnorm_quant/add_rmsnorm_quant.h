// What every CUDA and C++ add_rmsnorm_quant kernel is given, and how it becomes a torch op.
//
// residual += x, rounded once, and residual / sqrt(mean(residual^2) + eps) * weight as rows of bytes with a scale each
// (`ops/row_quant.h`). Without a residual, the same of x. Arithmetic is fp32. The factor 1 / sqrt(...) of a row is in its scale and
// not in its bytes, which are residual * weight over the largest of these.
//
// A kernel file defines `template <typename T, typename Y> void launch(const AddRmsNormQuant<T, Y>&)` and ends with
// `MINFER_ADD_RMSNORM_QUANT(add_rmsnorm_quant_<file name>, launch)`. T is float or a half type, Y is Float8E4M3 or int8_t.
#pragma once

#include <cmath>

#include "ops/row_quant.h"

namespace minfer {

// Rows are contiguous and their strides, in elements, may exceed `hidden`; y is dense.
template <typename T, typename Y>
struct AddRmsNormQuant {
  Y* y;
  float* scales;
  T* residual;  // null: there is none
  const T *x, *weight;
  int64_t residual_stride, x_stride;
  int tokens, hidden;
  float share, eps;  // 1 / hidden
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

// Throws unless rows can be read and written 16 bytes at a time, and y in as many pieces.
template <typename T, typename Y>
void require_vectors(const AddRmsNormQuant<T, Y>& p) {
  check_pieces(p.y, p.hidden, p.hidden, "add_rmsnorm_quant: y", 16 / sizeof(T));
  if (p.residual) check_pieces(p.residual, p.hidden, p.residual_stride, "add_rmsnorm_quant: residual");
  check_pieces(p.x, p.hidden, p.x_stride, "add_rmsnorm_quant: x");
  check_pieces(p.weight, p.hidden, p.hidden, "add_rmsnorm_quant: weight");
}

template <typename T, typename Y>
AddRmsNormQuant<T, Y> make_add_rmsnorm_quant(const Tensor& y, const Tensor& scales, const Tensor& residual, const Tensor& x,
                                             const Tensor& weight, double eps) {
  check_rank(x, "add_rmsnorm_quant: x", 2);
  const int64_t tokens = x.size(0), hidden = x.size(1);
  check_sizes(y, "add_rmsnorm_quant: y", {tokens, hidden}), check_contiguous(y, "add_rmsnorm_quant: y");
  check_sizes(scales, "add_rmsnorm_quant: scales", {tokens}), check_contiguous(scales, "add_rmsnorm_quant: scales");
  const bool added = residual.numel() > 0;
  check_sizes(residual, "add_rmsnorm_quant: residual", {added ? tokens : 0, hidden});
  check_sizes(weight, "add_rmsnorm_quant: weight", {hidden});
  check_rows(residual, "add_rmsnorm_quant: residual"), check_rows(x, "add_rmsnorm_quant: x");
  check_rows(weight, "add_rmsnorm_quant: weight");
  AddRmsNormQuant<T, Y> p;
  p.y = output<Y>(y, "add_rmsnorm_quant: y"), p.scales = output<float>(scales, "add_rmsnorm_quant: scales");
  p.residual = added ? output<T>(residual, "add_rmsnorm_quant: residual") : nullptr;
  p.x = input<T>(x, "add_rmsnorm_quant: x"), p.weight = input<T>(weight, "add_rmsnorm_quant: weight");
  p.residual_stride = tokens > 1 && added ? residual.stride(0) : hidden, p.x_stride = tokens > 1 ? x.stride(0) : hidden;
  p.tokens = to_int(tokens, "add_rmsnorm_quant: x"), p.hidden = to_int(hidden, "add_rmsnorm_quant: x");
  p.share = 1.0f / static_cast<float>(hidden), p.eps = static_cast<float>(eps);
#ifdef __CUDACC__
  p.stream = stream_of(x);
#endif
  return p;
}

// Calls launch(AddRmsNormQuant<T, Y>) with the types of the tensors; an empty output is no work.
template <typename Launch>
void dispatch(const Tensor& y, const Tensor& scales, const Tensor& residual, const Tensor& x, const Tensor& weight, double eps,
              Launch launch) {
  if (y.numel() == 0) return;
  dispatch<float, Half, BFloat16>(x.scalar_type(), "add_rmsnorm_quant: x", [&]<typename T>() {
    dispatch<Float8E4M3, int8_t>(y.scalar_type(), "add_rmsnorm_quant: y", [&]<typename Y>() {
      launch(make_add_rmsnorm_quant<T, Y>(y, scales, residual, x, weight, eps));
    });
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_ADD_RMSNORM_QUANT(NAME, LAUNCH)                                                                            \
  static void NAME(minfer::Tensor y, minfer::Tensor scales, minfer::Tensor residual, const minfer::Tensor x,              \
                   const minfer::Tensor weight, double eps) {                                                             \
    minfer::dispatch(y, scales, residual, x, weight, eps, [](const auto& p) { LAUNCH(p); });                              \
  }                                                                                                                       \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor(b!) scales, Tensor(c!) residual, Tensor x, Tensor weight, float eps=1e-6) -> ()")
