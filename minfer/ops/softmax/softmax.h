// What every CUDA and C++ softmax kernel is given, and how it becomes a torch op.
//
// y = exp(z - max z) / sum exp(z - max z) for each row of z, which is x under a mask. The mask is one of three tensors,
// told apart by dtype and size: empty, for none; (n,) of x's dtype, added to each row; or (rows,) int32, how many elements
// of each row count, from the first on. Those behind them are not used, and their y is 0. Sums are fp32, y is rounded once.
//
// A kernel file defines `template <typename T> void launch(const Softmax<T>&)` and ends with
// `MINFER_SOFTMAX(softmax_<file name>, launch)`. T is float or a half type.
#pragma once

#include "ops/op.h"

namespace minfer {

// Rows of y and x are contiguous and their strides, in elements, may exceed `n`.
template <typename T>
struct Softmax {
  T* y;
  const T* x;
  const T* bias;       // null without one
  const int* lengths;  // null without them
  int rows, n;
  int64_t y_stride, x_stride;
#ifdef __CUDACC__
  cudaStream_t stream;

  // How many elements of a row count; a length out of bounds is clamped.
  __device__ int valid(int row) const { return lengths ? min(max(lengths[row], 0), n) : n; }
#else
  int valid(int row) const { return lengths ? lengths[row] < 0 ? 0 : lengths[row] < n ? lengths[row] : n : n; }
#endif
};

// Throws unless rows can be read and written 16 bytes at a time.
template <typename T>
void require_vectors(const Softmax<T>& p) {
  check_pieces(p.y, p.n, p.y_stride, "softmax: y");
  check_pieces(p.x, p.n, p.x_stride, "softmax: x");
  if (p.bias) check_pieces(p.bias, p.n, p.n, "softmax: mask");
}

template <typename T>
Softmax<T> make_softmax(const Tensor& y, const Tensor& x, const Tensor& mask) {
  check_rank(x, "softmax: x", 2);
  const int64_t rows = x.size(0), n = x.size(1);
  check_sizes(y, "softmax: y", {rows, n});
  check_rows(y, "softmax: y");
  check_rows(x, "softmax: x");
  check_rank(mask, "softmax: mask", 1);
  check_rows(mask, "softmax: mask");

  Softmax<T> p;
  p.y = output<T>(y, "softmax: y");
  p.x = input<T>(x, "softmax: x");
  p.bias = nullptr, p.lengths = nullptr;
  if (mask.scalar_type() == ScalarType::Int) {
    check_sizes(mask, "softmax: mask", {rows});
    p.lengths = input<int>(mask, "softmax: mask");
  } else if (mask.numel() > 0) {
    check_sizes(mask, "softmax: mask", {n});
    p.bias = input<T>(mask, "softmax: mask");
  }
  p.rows = to_int(rows, "softmax: x"), p.n = to_int(n, "softmax: x");
  p.y_stride = rows > 1 ? y.stride(0) : n, p.x_stride = rows > 1 ? x.stride(0) : n;
#ifdef __CUDACC__
  p.stream = stream_of(x);
#endif
  return p;
}

// Calls launch(Softmax<T>) with the T of the tensors; an empty output is no work.
template <typename Launch>
void dispatch(const Tensor& y, const Tensor& x, const Tensor& mask, Launch launch) {
  if (y.numel() == 0) return;
  dispatch<float, Half, BFloat16>(x.scalar_type(), "softmax: x",
                                  [&]<typename T>() { launch(make_softmax<T>(y, x, mask)); });
  check_launch();
}

}  // namespace minfer

#define MINFER_SOFTMAX(NAME, LAUNCH)                                                          \
  static void NAME(minfer::Tensor y, const minfer::Tensor x, const minfer::Tensor mask) {     \
    minfer::dispatch(y, x, mask, [](const auto& p) { LAUNCH(p); });                           \
  }                                                                                           \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor x, Tensor mask) -> ()")
