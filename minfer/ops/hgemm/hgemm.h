// What every CUDA and C++ hgemm kernel is given, and how it becomes a torch op through PyTorch's stable ABI.
//
// A kernel file defines `template <typename T> void launch(const Gemm<T>&)` and ends with
// `MINFER_HGEMM(hgemm_<file name>, launch)`. T is a half type of the device: __half and __nv_bfloat16 under nvcc,
// torch's Half and BFloat16 in a C++ file.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <climits>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/stable/macros.h>
#endif

namespace minfer {

#ifdef __CUDACC__
using Half = __half;
using BFloat16 = __nv_bfloat16;
#define MINFER_DEVICE CUDA
#else
using Half = torch::headeronly::Half;
using BFloat16 = torch::headeronly::BFloat16;
#define MINFER_DEVICE CPU
#endif

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

template <typename T>
Gemm<T> make_gemm(torch::stable::Tensor& out, const torch::stable::Tensor& a, const torch::stable::Tensor& b,
                  double alpha, double beta) {
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && out.dim() == 2, "hgemm takes matrices");
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  STD_TORCH_CHECK(b.size(0) == k && out.size(0) == m && out.size(1) == n, "hgemm: shapes do not match: a (", m, ", ", k,
                  "), b (", b.size(0), ", ", n, "), out (", out.size(0), ", ", out.size(1), ")");
  STD_TORCH_CHECK(m <= INT_MAX && n <= INT_MAX && k <= INT_MAX, "hgemm: sizes must fit 32 bits");
  STD_TORCH_CHECK((a.stride(1) == 1 || k == 1) && (out.stride(1) == 1 || n == 1), "hgemm: a and out must be row-major");
  const bool row_major = b.stride(1) == 1 && b.stride(0) >= n;
  STD_TORCH_CHECK(row_major || b.stride(0) == 1, "hgemm: b must be contiguous in one dimension");

  Gemm<T> g;
  g.c = static_cast<T*>(out.mutable_data_ptr());
  g.a = static_cast<const T*>(a.const_data_ptr());
  g.b = static_cast<const T*>(b.const_data_ptr());
  g.m = static_cast<int>(m), g.n = static_cast<int>(n), g.k = static_cast<int>(k);
  g.lda = a.stride(0), g.ldb = row_major ? b.stride(0) : b.stride(1), g.ldc = out.stride(0);
  g.layout = row_major ? Layout::NN : Layout::TN;
  g.alpha = static_cast<float>(alpha), g.beta = static_cast<float>(beta);
#ifdef __CUDACC__
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(a.get_device_index(), &stream);
  g.stream = static_cast<cudaStream_t>(stream);
#endif
  return g;
}

// Calls launch(Gemm<T>) with the T of the operands; an empty output is no work.
template <typename Launch>
void dispatch(torch::stable::Tensor& out, const torch::stable::Tensor& a, const torch::stable::Tensor& b, double alpha,
              double beta, Launch launch) {
  using torch::headeronly::ScalarType;
  const ScalarType dtype = a.scalar_type();
  STD_TORCH_CHECK(b.scalar_type() == dtype && out.scalar_type() == dtype, "hgemm: a, b and out must have one dtype");
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16, "hgemm takes float16 or bfloat16");
  if (out.numel() == 0) return;
  if (dtype == ScalarType::Half)
    launch(make_gemm<Half>(out, a, b, alpha, beta));
  else
    launch(make_gemm<BFloat16>(out, a, b, alpha, beta));
#ifdef __CUDACC__
  STD_CUDA_KERNEL_LAUNCH_CHECK();
#endif
}

}  // namespace minfer

#define MINFER_HGEMM(NAME, LAUNCH)                                                                                    \
  static void NAME(torch::stable::Tensor out, const torch::stable::Tensor a, const torch::stable::Tensor b,           \
                   double alpha, double beta) {                                                                       \
    minfer::dispatch(out, a, b, alpha, beta, [](const auto& gemm) { LAUNCH(gemm); });                                 \
  }                                                                                                                   \
  STABLE_TORCH_LIBRARY_FRAGMENT(minfer, m) {                                                                          \
    m.def(#NAME "(Tensor(a!) out, Tensor a, Tensor b, float alpha=1.0, float beta=0.0) -> ()");                       \
  }                                                                                                                   \
  STABLE_TORCH_LIBRARY_IMPL_WRAP(minfer, MINFER_DEVICE, m) { m.impl(#NAME, TORCH_BOX(&NAME)); }

// The extra step lets MINFER_DEVICE expand before the library macro pastes it.
#define STABLE_TORCH_LIBRARY_IMPL_WRAP(NS, DEVICE, M) STABLE_TORCH_LIBRARY_IMPL(NS, DEVICE, M)
