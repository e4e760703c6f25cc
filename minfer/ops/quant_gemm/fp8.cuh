// Products of fp8 with fp8 by hgemm's mainloops, in which two neighbours in k are one element of 16 bits.
#pragma once

#include "cuda/mma.cuh"
#include "ops/gemm.h"
#include "quant_gemm.h"

namespace minfer {

// The product without its scales, as hgemm's tiles take it; y has the dtype Out. k counts pairs.
template <typename Out>
struct Scaled : Gemm<E4M3Pair> {
  Out* y;
  const float *x_scales, *w_scales;
};

template <typename Out>
Scaled<Out> make_scaled(const Product<Fp8Both, Out>& p) {
  check_pieces(p.x, p.k, p.k, "quant_gemm: x");
  check_pieces(p.weights.w, p.k, p.k, "quant_gemm: w");
  check_pieces(p.y, p.n, p.n, "quant_gemm: y");
  Scaled<Out> g;
  g.c = nullptr, g.a = reinterpret_cast<const E4M3Pair*>(p.x), g.b = reinterpret_cast<const E4M3Pair*>(p.weights.w);
  g.m = p.m, g.n = p.n, g.k = p.k / 2, g.lda = g.ldb = g.k, g.ldc = p.n;
  g.layout = Layout::TN, g.alpha = 1.0f, g.beta = 0.0f, g.stream = p.stream;
  g.y = p.y, g.x_scales = p.x_scales, g.w_scales = p.weights.scales;
  return g;
}

}  // namespace minfer
