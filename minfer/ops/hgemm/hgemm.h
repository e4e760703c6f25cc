// What every CUDA and C++ hgemm kernel is given, and how it becomes a torch op.
//
// A kernel file defines `template <typename T> void launch(const Gemm<T>&)` and ends with
// `MINFER_HGEMM(hgemm_<file name>, launch)`. T is a half type of the device: __half and __nv_bfloat16 under nvcc,
// torch's Half and BFloat16 in a C++ file.
#pragma once

#include "ops/op.h"

namespace minfer {

enum class Layout { NN, TN };  // TN: b is stored (N, K), contiguous in K

// c = alpha * a @ b + beta * c; leading dimensions in elements.
template <typename T>
struct Gemm {
  T* c;
  const T* a;
  const T* b;
  int m, n, k;
  int64_t lda, ldb, ldc;
  Layout layout;
  float alpha, beta;
#ifdef __CUDACC__
  cudaStream_t stream;
#endif
};

// How b (k, n) is stored, by the rule of minfer/functional. Where a dimension has size 1, PyTorch lets its stride be anything,
// and b may be both.
inline Layout layout_of(const Tensor& b) {
  const int64_t k = b.size(0), n = b.size(1), down = b.stride(0), across = b.stride(1);
  const bool by_columns = down == 1 && !(across == 1 && n == 1);
  return !by_columns && (across == 1 || n == 1) && (down >= n || k == 1) ? Layout::NN : Layout::TN;
}

// The distance of the rows of b (k, n), or in TN of its columns. A single one needs no distance and may have any stride:
// then it is the one that it has when contiguous, which TMA can be told. Throws where b is not stored like this.
inline int64_t leading(const Tensor& b, const char* who, Layout layout, const char* also = "") {
  const int within = layout == Layout::TN ? 0 : 1;
  STD_TORCH_CHECK(b.stride(within) == 1 || b.size(within) == 1, who, " must be contiguous in one dimension", also);
  return b.size(1 - within) > 1 ? b.stride(1 - within) : b.size(within);
}

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
