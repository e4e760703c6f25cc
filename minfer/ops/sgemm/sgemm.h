// What every CUDA and C++ sgemm kernel is given, and how it becomes a torch op.
//
// A kernel file defines `void launch(const Sgemm&)` and ends with `MINFER_SGEMM(sgemm_<file name>, launch)`.
#pragma once

#include "ops/op.h"

namespace minfer {

// c = a @ b, all row-major; leading dimensions in elements.
struct Sgemm {
  float* c;
  const float* a;
  const float* b;
  int m, n, k;
  int64_t lda, ldb, ldc;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

inline Sgemm make_sgemm(const Tensor& out, const Tensor& a, const Tensor& b) {
  check_rank(a, "sgemm: a", 2);
  const int64_t m = a.size(0), k = a.size(1), n = b.dim() == 2 ? b.size(1) : 0;
  check_sizes(b, "sgemm: b", {k, n});
  check_sizes(out, "sgemm: out", {m, n});
  check_rows(a, "sgemm: a");
  check_rows(b, "sgemm: b");
  check_rows(out, "sgemm: out");

  Sgemm g;
  g.c = output<float>(out, "sgemm: out");
  g.a = input<float>(a, "sgemm: a");
  g.b = input<float>(b, "sgemm: b");
  g.m = to_int(m, "sgemm: a"), g.n = to_int(n, "sgemm: b"), g.k = to_int(k, "sgemm: a");
  g.lda = m > 1 ? a.stride(0) : k, g.ldb = k > 1 ? b.stride(0) : n, g.ldc = m > 1 ? out.stride(0) : n;
#ifdef __CUDACC__
  g.stream = stream_of(a);
#endif
  return g;
}

}  // namespace minfer

// An empty output is no work.
#define MINFER_SGEMM(NAME, LAUNCH)                                                          \
  static void NAME(minfer::Tensor out, const minfer::Tensor a, const minfer::Tensor b) {    \
    if (out.numel() == 0) return;                                                           \
    LAUNCH(minfer::make_sgemm(out, a, b));                                                  \
    minfer::check_launch();                                                                 \
  }                                                                                         \
  MINFER_OP(NAME, "(Tensor(a!) out, Tensor a, Tensor b) -> ()")
