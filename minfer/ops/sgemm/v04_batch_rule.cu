// v04_batch_rule: v02 with the tile's side chosen at run time: 16 where the batch, the rows of A, is below 100, else 32.
// Idea: with few rows, tiles of 32 make few blocks, and half of the last row of tiles is padding. One kernel serves both
// sides, with its tiles in dynamic shared memory.
// Expected: little gain. At M = 64, N = 4096 there are 256 x 4 blocks instead of 128 x 2, and both occupy all of an H200's 132
// SMs. The price is paid at every M: the side is no constant, so the inner loop is not unrolled and computes its addresses,
// a few integer instructions for each multiply-add. It should be slower than v02 with tiles of the same side.
// Measured (H200, float32, m=n=k=8192): 6.309 TFLOP/s cold; 12.3 % of torch.
#include "sgemm.h"

namespace minfer {

constexpr int kFewRows = 100, kSmall = 16, kLarge = 32;

__global__ void __launch_bounds__(kLarge* kLarge) tiled(Sgemm g, int tile) {
  extern __shared__ float shared[];
  float* a_tile = shared;
  float* b_tile = shared + tile * tile;
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = blockIdx.y * tile + y, col = blockIdx.x * tile + x;
  float sum = 0.0f;
  for (int k0 = 0; k0 < g.k; k0 += tile) {
    a_tile[y * tile + x] = row < g.m && k0 + x < g.k ? g.a[row * g.lda + k0 + x] : 0.0f;
    b_tile[y * tile + x] = k0 + y < g.k && col < g.n ? g.b[(k0 + y) * g.ldb + col] : 0.0f;
    __syncthreads();
    for (int k = 0; k < tile; ++k) sum += a_tile[y * tile + k] * b_tile[k * tile + x];
    __syncthreads();
  }
  if (row < g.m && col < g.n) g.c[row * g.ldc + col] = sum;
}

void launch(const Sgemm& g) {
  const int tile = g.m < kFewRows ? kSmall : kLarge;
  const dim3 grid((g.n + tile - 1) / tile, (g.m + tile - 1) / tile);
  tiled<<<grid, dim3(tile, tile), 2 * tile * tile * sizeof(float), g.stream>>>(g, tile);
}

}  // namespace minfer

MINFER_SGEMM(sgemm_v04_batch_rule, minfer::launch)
