// v01_naive: one thread an output element, straight from global memory.
// Idea: the definition in one kernel: both sums share the reads of x, and nothing lies in memory between the products and y.
// Expected: bound by the load units, three 2-byte loads for two multiply-adds, so about 1 % of what tensor cores do; at
// (1048576, 128) x (128, 64) some 20 times slower than memory, which would take 94 us.
// Measured (H200, float16, sigmoid, NN, m=n=k=8192): 5.293 TFLOP/s cold; 0.872 % of torch.
#include "gated_unit.h"

namespace minfer {

template <typename T>
__global__ void naive(Gated<T> g) {
  const int col = blockIdx.y * blockDim.x + threadIdx.x;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= g.m || col >= g.n) return;

  const bool tn = g.layout == Layout::TN;
  const int64_t step1 = tn ? 1 : g.ldb, step2 = tn ? 1 : g.ldw2;
  const T* x = g.a + row * g.lda;
  const T* w1 = g.b + (tn ? col * g.ldb : int64_t(col));
  const T* w2 = g.w2 + (tn ? col * g.ldw2 : int64_t(col));
  float h1 = 0.0f, h2 = 0.0f;
  for (int k = 0; k < g.k; ++k) {
    const float value = float(x[k]);
    h1 += value * float(w1[k * step1]), h2 += value * float(w2[k * step2]);
  }
  if (g.bias1) h1 += float(g.bias1[col]), h2 += float(g.bias2[col]);
  g.c[row * g.ldc + col] = T(gated(h1, h2, g.silu));
}

template <typename T>
void launch(const Gated<T>& g) {
  const dim3 block(32, 8);
  const dim3 grid((g.m + block.y - 1) / block.y, (g.n + block.x - 1) / block.x);
  naive<<<grid, block, 0, g.stream>>>(g);
}

}  // namespace minfer

MINFER_GATED_UNIT(gated_unit_v01_naive, minfer::launch)
