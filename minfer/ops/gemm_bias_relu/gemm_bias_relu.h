// What every CUDA and C++ gemm_bias_relu kernel is given, and how it becomes a torch op.
//
// A kernel file defines `template <typename T> void launch(const Biased<T>&)` and ends with
// `MINFER_GEMM_BIAS_RELU(gemm_bias_relu_<file name>, launch)`. T is a half type of the device.
#pragma once

#define MINFER_BIASED "gemm_bias_relu"
#include "ops/gemm_bias.h"

namespace minfer {

#ifdef __CUDACC__
// What is negative is 0, and NaN stays NaN.
__device__ inline float relu(float x) { return x < 0.0f ? 0.0f : x; }

struct Relu {
  __device__ float operator()(float x) const { return relu(x); }
};
#else
inline float relu(float x) { return x < 0.0f ? 0.0f : x; }
#endif

}  // namespace minfer

#define MINFER_GEMM_BIAS_RELU(NAME, LAUNCH)                                                                   \
  static void NAME(minfer::Tensor y, const minfer::Tensor a, const minfer::Tensor b, const minfer::Tensor bias) { \
    minfer::dispatch(y, a, b, bias, [](const auto& biased) { LAUNCH(biased); });                              \
  }                                                                                                           \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor a, Tensor b, Tensor bias) -> ()")
