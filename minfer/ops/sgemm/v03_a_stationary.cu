// v03_a_stationary: one thread an element of A, which it keeps in a register; its products are added to C in memory.
// Idea, and what is wrong with it: A is read once. But element (m, k) belongs to all N sums of row m, so that the thread
// makes N atomic additions: M N K of them, and the 32 threads of a warp, which differ in k, add to one element at a time.
// Expected: 10^9 additions at 1024 x 1024 x 1024. Even if the L2 finished one addition a cycle in each of about 100 slices,
// 1.7 x 10^11 a second, this would take 6 ms, where v02 takes under 1 ms; additions to the same element queue up, so it
// will be more. And the order of the additions is chance, so that two runs differ in their last bits.
// Measured (H200, float32, m=n=k=1024): 0.1363 TFLOP/s cold; 0.412 % of torch.
#include "sgemm.h"

namespace minfer {

constexpr int kCols = 32, kRows = 8;  // of a block's part of A

__global__ void zero(Sgemm g) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  for (int row = blockIdx.y; row < g.m; row += gridDim.y)
    if (col < g.n) g.c[row * g.ldc + col] = 0.0f;
}

__global__ void __launch_bounds__(kCols* kRows) a_stationary(Sgemm g) {
  const int row = blockIdx.y * kRows + threadIdx.y, k = blockIdx.x * kCols + threadIdx.x;
  if (row >= g.m || k >= g.k) return;
  const float a = g.a[row * g.lda + k];
  const float* b = g.b + k * g.ldb;
  float* c = g.c + row * g.ldc;
  for (int col = 0; col < g.n; ++col) atomicAdd(c + col, a * b[col]);
}

void launch(const Sgemm& g) {
  zero<<<dim3((g.n + 255) / 256, g.m < 65535 ? g.m : 65535), 256, 0, g.stream>>>(g);
  if (g.k == 0) return;
  const dim3 grid((g.k + kCols - 1) / kCols, (g.m + kRows - 1) / kRows);
  a_stationary<<<grid, dim3(kCols, kRows), 0, g.stream>>>(g);
}

}  // namespace minfer

MINFER_SGEMM(sgemm_v03_a_stationary, minfer::launch)
