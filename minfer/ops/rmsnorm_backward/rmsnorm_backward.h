// What every CUDA and C++ rmsnorm_backward kernel is given, and how it becomes a torch op.
//
// With r = 1 / sqrt(mean(x^2) + eps), g = dy weight and means over a row:
// dx = r (g - x r^2 mean(g x)), and dweight is the sum of dy x r over all rows. Sums are fp32.
//
// A kernel file defines `template <typename T> void launch(const RmsNormBackward<T>&)` and ends with
// `MINFER_RMSNORM_BACKWARD(rmsnorm_backward_<file name>, launch)`. T is float or a half type.
#pragma once

#include "ops/op.h"

namespace minfer {

// Rows are contiguous and their strides, in elements, may exceed `hidden`.
template <typename T>
struct RmsNormBackward {
  T* dx;
  T* dweight;
  const T* dy;
  const T* x;
  const T* weight;
  const float* rstd;  // r of each row, or null: computed from x
  int tokens, hidden;
  int64_t dx_stride, dy_stride, x_stride;
  float share;  // 1 / hidden
  float eps;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

// Throws unless rows can be read and written 16 bytes at a time.
template <typename T>
void require_vectors(const RmsNormBackward<T>& p) {
  check_pieces(p.dx, p.hidden, p.dx_stride, "rmsnorm_backward: dx");
  check_pieces(p.dy, p.hidden, p.dy_stride, "rmsnorm_backward: dy");
  check_pieces(p.x, p.hidden, p.x_stride, "rmsnorm_backward: x");
  check_pieces(p.weight, p.hidden, p.hidden, "rmsnorm_backward: weight");
}

template <typename T>
RmsNormBackward<T> make_rmsnorm_backward(const Tensor& dx, const Tensor& dweight, const Tensor& dy, const Tensor& x,
                                         const Tensor& weight, const Tensor& rstd, double eps) {
  check_rank(x, "rmsnorm_backward: x", 2);
  const int64_t tokens = x.size(0), hidden = x.size(1);
  check_sizes(dx, "rmsnorm_backward: dx", {tokens, hidden});
  check_sizes(dy, "rmsnorm_backward: dy", {tokens, hidden});
  check_sizes(dweight, "rmsnorm_backward: dweight", {hidden});
  check_sizes(weight, "rmsnorm_backward: weight", {hidden});
  check_rows(dx, "rmsnorm_backward: dx");
  check_rows(dy, "rmsnorm_backward: dy");
  check_rows(x, "rmsnorm_backward: x");
  check_rows(dweight, "rmsnorm_backward: dweight");
  check_rows(weight, "rmsnorm_backward: weight");
  check_rank(rstd, "rmsnorm_backward: rstd", 1);
  if (rstd.numel() > 0) check_sizes(rstd, "rmsnorm_backward: rstd", {tokens});
  check_rows(rstd, "rmsnorm_backward: rstd");

  RmsNormBackward<T> p;
  p.dx = output<T>(dx, "rmsnorm_backward: dx");
  p.dweight = output<T>(dweight, "rmsnorm_backward: dweight");
  p.dy = input<T>(dy, "rmsnorm_backward: dy");
  p.x = input<T>(x, "rmsnorm_backward: x");
  p.weight = input<T>(weight, "rmsnorm_backward: weight");
  p.rstd = rstd.numel() > 0 ? input<float>(rstd, "rmsnorm_backward: rstd") : nullptr;
  p.tokens = to_int(tokens, "rmsnorm_backward: x"), p.hidden = to_int(hidden, "rmsnorm_backward: x");
  p.dx_stride = tokens > 1 ? dx.stride(0) : hidden, p.dy_stride = tokens > 1 ? dy.stride(0) : hidden;
  p.x_stride = tokens > 1 ? x.stride(0) : hidden;
  p.share = 1.0f / static_cast<float>(hidden), p.eps = static_cast<float>(eps);
#ifdef __CUDACC__
  p.stream = stream_of(x);
#endif
  return p;
}

// Calls launch(RmsNormBackward<T>) with the T of the tensors; an empty x is no work.
template <typename Launch>
void dispatch(const Tensor& dx, const Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& weight,
              const Tensor& rstd, double eps, Launch launch) {
  if (x.numel() == 0) return;
  dispatch<float, Half, BFloat16>(x.scalar_type(), "rmsnorm_backward: x", [&]<typename T>() {
    launch(make_rmsnorm_backward<T>(dx, dweight, dy, x, weight, rstd, eps));
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_RMSNORM_BACKWARD(NAME, LAUNCH)                                                                      \
  static void NAME(minfer::Tensor dx, minfer::Tensor dweight, const minfer::Tensor dy, const minfer::Tensor x,     \
                   const minfer::Tensor weight, const minfer::Tensor rstd, double eps) {                           \
    minfer::dispatch(dx, dweight, dy, x, weight, rstd, eps, [](const auto& p) { LAUNCH(p); });                     \
  }                                                                                                                \
  MINFER_OP(NAME,                                                                                                  \
            "(Tensor(a!) dx, Tensor(b!) dweight, Tensor dy, Tensor x, Tensor weight, Tensor rstd, float eps=1e-6) " \
            "-> ()")
