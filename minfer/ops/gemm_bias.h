// A product with a bias and an activation. The op's own header defines MINFER_BIASED, its name in errors, and then includes
// this.
#pragma once

#include "ops/gemm.h"

#ifndef MINFER_BIASED
#error "include the op's own header first: it defines MINFER_BIASED"
#endif

namespace minfer {

// c = activation(a b + bias): a product, of which it has all that hgemm's tiles ask for.
template <typename T>
struct Biased : Gemm<T> {
  const T* bias;
};

template <typename T>
Biased<T> make_biased(const Tensor& y, const Tensor& a, const Tensor& b, const Tensor& bias) {
  check_rank(a, MINFER_BIASED ": a", 2);
  check_rank(b, MINFER_BIASED ": b", 2);
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  check_sizes(b, MINFER_BIASED ": b", {k, n});
  check_sizes(bias, MINFER_BIASED ": bias", {n});
  check_sizes(y, MINFER_BIASED ": y", {m, n});
  check_rows(a, MINFER_BIASED ": a");
  check_rows(bias, MINFER_BIASED ": bias");
  check_rows(y, MINFER_BIASED ": y");

  Biased<T> g;
  g.c = output<T>(y, MINFER_BIASED ": y");
  g.a = input<T>(a, MINFER_BIASED ": a");
  g.b = input<T>(b, MINFER_BIASED ": b");
  g.bias = input<T>(bias, MINFER_BIASED ": bias");
  g.m = to_int(m, MINFER_BIASED ": a"), g.n = to_int(n, MINFER_BIASED ": b"), g.k = to_int(k, MINFER_BIASED ": a");
  g.layout = layout_of(b), g.ldb = leading(b, MINFER_BIASED ": b", g.layout);
  g.lda = m > 1 ? a.stride(0) : k, g.ldc = m > 1 ? y.stride(0) : n;
  g.alpha = 1.0f, g.beta = 0.0f;
#ifdef __CUDACC__
  g.stream = stream_of(a);
#endif
  return g;
}

// Throws unless 16 bytes at once may be read of each row of a and b, and written of y, and 4 of the bias.
template <typename T>
void require_rows(const Biased<T>& g) {
  check_pieces(g.c, g.n, g.ldc, MINFER_BIASED ": y");
  check_pieces(g.a, g.k, g.lda, MINFER_BIASED ": a");
  check_pieces(g.b, g.layout == Layout::TN ? g.k : g.n, g.ldb, MINFER_BIASED ": b");
  check_pieces(g.bias, g.n, g.n, MINFER_BIASED ": bias", 4);
}

// Calls launch(Biased<T>) with the T of the tensors; an empty output is no work.
template <typename Launch>
void dispatch(const Tensor& y, const Tensor& a, const Tensor& b, const Tensor& bias, Launch launch) {
  if (y.numel() == 0) return;
  dispatch<Half, BFloat16>(a.scalar_type(), MINFER_BIASED ": a",
                           [&]<typename T>() { launch(make_biased<T>(y, a, b, bias)); });
  check_launch();
}

}  // namespace minfer
