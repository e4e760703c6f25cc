// A product of two matrices, for the ops that have one.
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

}  // namespace minfer
