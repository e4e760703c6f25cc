// What every CUDA and C++ gated_unit kernel is given, and how it becomes a torch op.
//
// A kernel file defines `template <typename T> void launch(const Gated<T>&)` and ends with
// `MINFER_GATED_UNIT(gated_unit_<file name>, launch)`. T is a half type of the device.
#pragma once

#include <cmath>

#include "ops/gemm.h"

namespace minfer {

// c = gate(a b + bias1) * (a w2 + bias2): a product c = a b, of which it has all that hgemm's tiles ask for, and a second b
// in the same layout. The gate is the sigmoid; or, where there are no biases, SiLU: both pointers are null then.
template <typename T>
struct Gated : Gemm<T> {
  const T *w2, *bias1, *bias2;
  int64_t ldw2;
  bool silu;
};

// gate(h1) * h2. It holds for h1 of any size: exp(-h1) may be infinite, and divides what is finite.
#ifdef __CUDACC__
__device__ inline float gated(float h1, float h2, bool silu) {
  return __fdividef(silu ? h1 : 1.0f, 1.0f + __expf(-h1)) * h2;
}
#else
inline float gated(float h1, float h2, bool silu) { return (silu ? h1 : 1.0f) / (1.0f + std::exp(-h1)) * h2; }
#endif

inline void check_bias(const Tensor& bias, const char* who, int64_t size) {
  check_sizes(bias, who, {size});
  check_rows(bias, who);
}

template <typename T>
Gated<T> make_gated(const Tensor& y, const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2,
                    const Tensor& b2) {
  check_rank(x, "gated_unit: x", 2);
  check_rank(w1, "gated_unit: w1", 2);
  const int64_t m = x.size(0), k = x.size(1), n = w1.size(1);
  check_sizes(w1, "gated_unit: w1", {k, n});
  check_sizes(w2, "gated_unit: w2", {k, n});
  check_sizes(y, "gated_unit: y", {m, n});
  const int64_t biases = b1.numel() ? n : 0;
  check_bias(b1, "gated_unit: b1", biases);
  check_bias(b2, "gated_unit: b2", biases);
  check_rows(x, "gated_unit: x");
  check_rows(y, "gated_unit: y");

  Gated<T> g;
  g.c = output<T>(y, "gated_unit: y");
  g.a = input<T>(x, "gated_unit: x");
  g.b = input<T>(w1, "gated_unit: w1"), g.w2 = input<T>(w2, "gated_unit: w2");
  g.bias1 = biases ? input<T>(b1, "gated_unit: b1") : nullptr;
  g.bias2 = biases ? input<T>(b2, "gated_unit: b2") : nullptr;
  g.m = to_int(m, "gated_unit: x"), g.n = to_int(n, "gated_unit: w1"), g.k = to_int(k, "gated_unit: x");
  constexpr const char* kSame = ", and the same one as the other weight";
  g.layout = layout_of(w1), g.ldb = leading(w1, "gated_unit: w1", g.layout, kSame);
  g.ldw2 = leading(w2, "gated_unit: w2", g.layout, kSame);
  g.lda = m > 1 ? x.stride(0) : k, g.ldc = m > 1 ? y.stride(0) : n;
  g.alpha = 1.0f, g.beta = 0.0f, g.silu = !biases;
#ifdef __CUDACC__
  g.stream = stream_of(x);
#endif
  return g;
}

// Throws unless 16 bytes at once may be read of each row of x and of the weights, and written of y, and 4 of the biases.
template <typename T>
void require_rows(const Gated<T>& g) {
  const int64_t across = g.layout == Layout::TN ? g.k : g.n;
  check_pieces(g.c, g.n, g.ldc, "gated_unit: y");
  check_pieces(g.a, g.k, g.lda, "gated_unit: x");
  check_pieces(g.b, across, g.ldb, "gated_unit: w1");
  check_pieces(g.w2, across, g.ldw2, "gated_unit: w2");
  if (g.bias1) check_pieces(g.bias1, g.n, g.n, "gated_unit: b1", 4), check_pieces(g.bias2, g.n, g.n, "gated_unit: b2", 4);
}

// Calls launch(Gated<T>) with the T of the tensors; an empty output is no work.
template <typename Launch>
void dispatch(const Tensor& y, const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2,
              Launch launch) {
  if (y.numel() == 0) return;
  dispatch<Half, BFloat16>(x.scalar_type(), "gated_unit: x",
                           [&]<typename T>() { launch(make_gated<T>(y, x, w1, b1, w2, b2)); });
  check_launch();
}

}  // namespace minfer

#define MINFER_GATED_UNIT(NAME, LAUNCH)                                                                       \
  static void NAME(minfer::Tensor y, const minfer::Tensor x, const minfer::Tensor w1, const minfer::Tensor b1, \
                   const minfer::Tensor w2, const minfer::Tensor b2) {                                        \
    minfer::dispatch(y, x, w1, b1, w2, b2, [](const auto& gated) { LAUNCH(gated); });                         \
  }                                                                                                           \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2) -> ()")
