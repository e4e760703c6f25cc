// v01_naive: one thread an output element, operands straight from global memory.
// Idea: the definition, nothing else; neighbouring threads share a row of A and take neighbouring columns of B.
// Expected: bound by the load units, with two 2-byte loads a multiply-add: about 1 % of cuBLAS in NN. In TN a tenth of that,
// because a warp's reads of B are K elements apart and each fetches a cache line of its own.
// Measured (H200, bfloat16, TN, float32, m=n=k=8192): 0.4936 TFLOP/s cold, 0.5058 steady; 0.0631 % and 0.0757 % of torch.
#include "hgemm.h"

namespace minfer {

template <typename T>
__global__ void naive(Gemm<T> g) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= g.m || col >= g.n) return;

  const int64_t k_stride = g.layout == Layout::TN ? 1 : g.ldb;
  const T* a = g.a + row * g.lda;
  const T* b = g.b + (g.layout == Layout::TN ? col * g.ldb : int64_t(col));
  float sum = 0.0f;
  for (int k = 0; k < g.k; ++k) sum += float(a[k]) * float(b[k * k_stride]);

  T* c = g.c + row * g.ldc + col;
  *c = T(g.alpha * sum + (g.beta != 0.0f ? g.beta * float(*c) : 0.0f));
}

template <typename T>
void launch(const Gemm<T>& g) {
  const dim3 block(32, 8);
  const dim3 grid((g.n + block.x - 1) / block.x, (g.m + block.y - 1) / block.y);
  naive<<<grid, block, 0, g.stream>>>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v01_naive, minfer::launch)
