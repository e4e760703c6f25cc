// What every CUDA and C++ quant_gemm kernel is given, and how it becomes a torch op.
//
// A kernel file defines `template <typename F, typename T> void launch(const Product<F, T>&)`, F one of the formats and T a
// half type, and ends with `MINFER_QUANT_GEMM_OF(quant_gemm_<file name>, ...)`. Where x is fp8 too, F is `Fp8Both`.
#pragma once

#include "ops/formats.h"

namespace minfer {

struct Fp8Both : Fp8 {};
template <>
constexpr bool kIsFp8<Fp8Both> = true;

// y (m, n) = x (m, k) times the weights, all row-major without gaps.
template <typename F_, typename T_>
struct Product {
  using F = F_;
  using T = T_;
  using X = std::conditional_t<std::is_same_v<F, Fp8Both>, uint8_t, T>;  // bytes are e4m3

  T* y;
  const X* x;
  const float* x_scales;  // one a row where x is fp8
  Weights<Scale<F, T>> weights;
  int m, n, k;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

template <typename F, typename T>
Product<F, T> make_product(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& scales, const Tensor& zeros,
                           const Tensor& x_scales) {
  Product<F, T> p;
  p.weights = make_weights<F, T>(w, scales, zeros, "quant_gemm");
  check_rank(x, "quant_gemm: x", 2);
  p.m = to_int(x.size(0), "quant_gemm: x"), p.n = to_int(p.weights.n, "quant_gemm: w"), p.k = p.weights.k;
  check_sizes(x, "quant_gemm: x", {p.m, p.k});
  check_sizes(y, "quant_gemm: y", {p.m, p.n});
  check_contiguous(x, "quant_gemm: x");
  check_contiguous(y, "quant_gemm: y");
  p.y = output<T>(y, "quant_gemm: y");
  p.x_scales = nullptr;
  if constexpr (std::is_same_v<F, Fp8Both>) {
    check_sizes(x_scales, "quant_gemm: x_scales", {p.m});
    check_contiguous(x_scales, "quant_gemm: x_scales");
    p.x_scales = input<float>(x_scales, "quant_gemm: x_scales");
    p.x = static_cast<const uint8_t*>(x.const_data_ptr());
  } else {
    p.x = input<T>(x, "quant_gemm: x");
  }
#ifdef __CUDACC__
  p.stream = stream_of(y);
#endif
  return p;
}

// Calls launch(Product) with the format of w and the type of y; kBoth: with x in fp8, else with any weights-only format.
template <bool kWeightsOnly, bool kBoth, typename Launch>
void dispatch(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& scales, const Tensor& zeros,
              const Tensor& x_scales, Launch launch) {
  if (y.numel() == 0) return;
  dispatch<Half, BFloat16>(y.scalar_type(), "quant_gemm: y", [&]<typename T>() {
    const bool both = x.scalar_type() == ScalarType::Float8_e4m3fn;
    STD_TORCH_CHECK(both ? kBoth : kWeightsOnly, "quant_gemm: x must ", both ? "not " : "",
                    "be float8_e4m3fn for this kernel");
    if (both) {
      check_dtype(w, "quant_gemm: w", ScalarType::Float8_e4m3fn);
      if constexpr (kBoth) launch(make_product<Fp8Both, T>(y, x, w, scales, zeros, x_scales));
    } else if constexpr (kWeightsOnly) {
      with_format(w, "quant_gemm: w",
                  [&]<typename F>() { launch(make_product<F, T>(y, x, w, scales, zeros, x_scales)); });
    }
  });
  check_launch();
}

}  // namespace minfer

#define MINFER_QUANT_GEMM_OF(NAME, WEIGHTS_ONLY, BOTH, LAUNCH)                                                        \
  static void NAME(minfer::Tensor y, const minfer::Tensor x, const minfer::Tensor w, const minfer::Tensor scales,     \
                   const minfer::Tensor zeros, const minfer::Tensor x_scales, const minfer::Tensor /*packed_w*/,      \
                   const minfer::Tensor /*packed_scales*/) {                                                         \
    minfer::dispatch<WEIGHTS_ONLY, BOTH>(y, x, w, scales, zeros, x_scales, [](const auto& p) { LAUNCH(p); });          \
  }                                                                                                                   \
  MINFER_OP(NAME,                                                                                                     \
            "(Tensor(a!) y, Tensor x, Tensor w, Tensor scales, Tensor zeros, Tensor x_scales, Tensor packed_w, "      \
            "Tensor packed_scales) -> ()")
