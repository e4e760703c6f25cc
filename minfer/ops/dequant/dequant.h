// What every CUDA and C++ dequant kernel is given, and how it becomes a torch op.
//
// A kernel file defines `template <typename F, typename T> void launch(T* y, const Weights<Scale<F, T>>&, ...)`, F one of the
// formats, and ends with `MINFER_DEQUANT(dequant_<file name>)`.
#pragma once

#include "ops/formats.h"

#ifdef __CUDACC__
#define MINFER_STREAM_OF(TENSOR) , minfer::stream_of(TENSOR)
#else
#define MINFER_STREAM_OF(TENSOR)
#endif

#define MINFER_DEQUANT(NAME)                                                                                              \
  static void NAME(minfer::Tensor y, const minfer::Tensor w, const minfer::Tensor scales, const minfer::Tensor zeros) { \
    using namespace minfer;                                                                                               \
    with_format(w, "dequant: w", [&]<typename F>() {                                                                      \
      dispatch<float, Half, BFloat16>(y.scalar_type(), "dequant: y", [&]<typename T>() {                                  \
        const auto weights = make_weights<F, T>(w, scales, zeros, "dequant");                                             \
        check_sizes(y, "dequant: y", {weights.n, weights.k});                                                             \
        check_contiguous(y, "dequant: y");                                                                                \
        if (y.numel()) launch<F>(output<T>(y, "dequant: y"), weights MINFER_STREAM_OF(y));                                \
      });                                                                                                                 \
    });                                                                                                                   \
    check_launch();                                                                                                       \
  }                                                                                                                       \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor w, Tensor scales, Tensor zeros) -> ()")
