// What every CUDA and C++ hgemm kernel is given, and how it becomes a torch op.
//
// A kernel file defines `template <typename T> void launch(const Gemm<T>&)` and ends with
// `MINFER_HGEMM(hgemm_<file name>, launch)`. T is a half type of the device: __half and __nv_bfloat16 under nvcc,
// torch's Half and BFloat16 in a C++ file.
#pragma once

#include "ops/gemm.h"

namespace minfer {

template <typename T>
Gemm<T> make_gemm(const Tensor& out, const Tensor& a, const Tensor& b, double alpha, double beta) {
  check_rank(a, "hgemm: a", 2);
  const int64_t m = a.size(0), k = a.size(1), n = b.dim() == 2 ? b.size(1) : 0;
  check_sizes(b, "hgemm: b", {k, n});
  check_sizes(out, "hgemm: out", {m, n});
  check_rows(a, "hgemm: a");
  check_rows(out, "hgemm: out");

  Gemm<T> g;
  g.c = output<T>(out, "hgemm: out");
  g.a = input<T>(a, "hgemm: a");
  g.b = input<T>(b, "hgemm: b");
  g.m = to_int(m, "hgemm: a"), g.n = to_int(n, "hgemm: b"), g.k = to_int(k, "hgemm: a");
  g.layout = layout_of(b), g.ldb = leading(b, "hgemm: b", g.layout);
  g.lda = m > 1 ? a.stride(0) : k, g.ldc = m > 1 ? out.stride(0) : n;
  g.alpha = static_cast<float>(alpha), g.beta = static_cast<float>(beta);
#ifdef __CUDACC__
  g.stream = stream_of(a);
#endif
  return g;
}

// Calls launch(Gemm<T>) with the T of the operands; an empty output is no work.
template <typename Launch>
void dispatch(const Tensor& out, const Tensor& a, const Tensor& b, double alpha, double beta, Launch launch) {
  if (out.numel() == 0) return;
  dispatch<Half, BFloat16>(a.scalar_type(), "hgemm: a",
                           [&]<typename T>() { launch(make_gemm<T>(out, a, b, alpha, beta)); });
  check_launch();
}

}  // namespace minfer

#define MINFER_HGEMM(NAME, LAUNCH)                                                                                  \
  static void NAME(minfer::Tensor out, const minfer::Tensor a, const minfer::Tensor b, double alpha, double beta) { \
    minfer::dispatch(out, a, b, alpha, beta, [](const auto& gemm) { LAUNCH(gemm); });                               \
  }                                                                                                                 \
  MINFER_OP(NAME, "(Tensor(a!) out, Tensor a, Tensor b, float alpha=1.0, float beta=0.0) -> ()")
