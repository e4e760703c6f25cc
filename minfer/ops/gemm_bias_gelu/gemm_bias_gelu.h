// What every CUDA and C++ gemm_bias_gelu kernel is given, and how it becomes a torch op. It gets what a gemm_bias_relu
// kernel gets, and the form of GELU. A kernel file defines `template <typename T> void launch(const Biased<T>&, Gelu)` and
// ends with `MINFER_GEMM_BIAS_GELU(gemm_bias_gelu_<file name>, launch)`.
#pragma once

#define MINFER_BIASED "gemm_bias_gelu"
#ifdef __CUDACC__
#include "cuda/exp2.cuh"
#endif
#include "ops/gemm_bias.h"

namespace minfer {

// The erf form is x Phi(x) = x (1 + erf(x / sqrt(2))) / 2. The tanh form is x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x +
// 0.044715 x^3); this is x sigmoid(2 u), which takes one exponential.
struct Gelu {
  bool tanh;

#ifdef __CUDACC__
  __device__ float operator()(float x) const { return tanh ? by_tanh(x) : by_erf(x); }
  __device__ static float by_tanh(float x) {
    return __fdividef(x, 1.0f + exp2_approx(x * (-2.3022082f - 0.10294324f * x * x)));
  }
  // max(x, 0) - |x| (1 - Phi(|x|)), with 1 - Phi(a) = 2^P(a). P is a polynomial that was fitted up to a = 7: the result is off
  // by at most 7 roundings of |x|, and below 0 by less than 4e-5 of itself. CUDA's erff takes three times the instructions.
  __device__ static float by_erf(float x) {
    const float a = fminf(fabsf(x), 16.0f);
    float p = -8.15844601e-8f;
    p = p * a + 4.23086988e-7f;
    p = p * a + 3.69170884e-5f;
    p = p * a - 7.94721826e-4f;
    p = p * a + 8.1115216e-3f;
    p = p * a - 0.0533664636f;
    p = p * a - 0.458872288f;
    p = p * a - 1.15115154f;
    p = p * a - 0.999998987f;
    return (x < 0.0f ? 0.0f : x) - a * exp2_approx(p);  //@ gelu
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
