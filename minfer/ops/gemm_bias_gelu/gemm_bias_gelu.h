// What every CUDA and C++ gemm_bias_gelu kernel is given, and how it becomes a torch op. It gets what a gemm_bias_relu
// kernel gets, and the form of GELU. A kernel file defines `template <typename T> void launch(const Biased<T>&, Gelu)` and
// ends with `MINFER_GEMM_BIAS_GELU(gemm_bias_gelu_<file name>, launch)`.
#pragma once

#define MINFER_BIASED "gemm_bias_gelu"
#include "ops/gemm_bias.h"

namespace minfer {

// The erf form is x Phi(x) = x (1 + erf(x / sqrt(2))) / 2. The tanh form is x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x +
// 0.044715 x^3); this is x sigmoid(2 u), which takes one exponential.
struct Gelu {
  bool tanh;

#ifdef __CUDACC__
  __device__ float operator()(float x) const {
    if (tanh) return __fdividef(x, 1.0f + __expf(x * (-1.5957691f - 0.07135482f * x * x)));
    return 0.5f * x * (1.0f + erff(0.70710678f * x));  //@ gelu
  }
#else
  float operator()(float x) const {
    if (tanh) return x / (1.0f + std::exp(x * (-1.5957691f - 0.07135482f * x * x)));
    return 0.5f * x * (1.0f + std::erf(0.70710678f * x));
  }
#endif
};

}  // namespace minfer

#define MINFER_GEMM_BIAS_GELU(NAME, LAUNCH)                                                                     \
  static void NAME(minfer::Tensor y, const minfer::Tensor a, const minfer::Tensor b, const minfer::Tensor bias, \
                   bool tanh) {                                                                                 \
    minfer::dispatch(y, a, b, bias, [&](const auto& biased) { LAUNCH(biased, minfer::Gelu{tanh}); });           \
  }                                                                                                             \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor a, Tensor b, Tensor bias, bool tanh) -> ()")
