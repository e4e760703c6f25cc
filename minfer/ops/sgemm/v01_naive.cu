// v01_naive: one thread an element of C, which reads a row of A and a column of B from global memory.
// Idea: the definition. Neighbouring threads take neighbouring columns, so that a warp reads 128 bytes of B side by side
// and one element of A, which it broadcasts.
// Expected: two loads a multiply-add. The L1 hands out 128 bytes a cycle, which is one warp's load of B; the broadcast of A
// takes a cycle too. Two cycles for 32 multiply-adds, where the SM could do 256: an eighth of its peak, 8 TFLOP/s on an
// H200 (67), if all hits the L1.
// Measured (H200, float32, m=n=k=8192): 5.451 TFLOP/s cold; 10.6 % of torch.
#include "sgemm.h"

namespace minfer {

constexpr int kCols = 32, kRows = 8;  // of a block

__global__ void __launch_bounds__(kCols* kRows) naive(Sgemm g) {
  const int row = blockIdx.y * kRows + threadIdx.y, col = blockIdx.x * kCols + threadIdx.x;
  if (row >= g.m || col >= g.n) return;
  const float* a = g.a + row * g.lda;
  const float* b = g.b + col;
  float sum = 0.0f;
  for (int k = 0; k < g.k; ++k) sum += a[k] * b[k * g.ldb];
  g.c[row * g.ldc + col] = sum;
}

void launch(const Sgemm& g) {
  const dim3 grid((g.n + kCols - 1) / kCols, (g.m + kRows - 1) / kRows);
  naive<<<grid, dim3(kCols, kRows), 0, g.stream>>>(g);
}

}  // namespace minfer

MINFER_SGEMM(sgemm_v01_naive, minfer::launch)
