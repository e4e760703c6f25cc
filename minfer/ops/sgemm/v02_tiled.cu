// v02_tiled16, v02_tiled32: square tiles of A and B in shared memory, one thread an element of C.
// Idea: a block loads each tile once, and every element of it serves a whole row or column of threads: global traffic
// falls by the tile's side, 16 or 32.
// Expected: little over v01, whose loads hit the L1: shared memory is the same hardware and delivers the same 128 bytes a
// cycle. nvcc reads four neighbouring words of A's tile with one load, so that a warp has 5 loads for 4 multiply-adds
// instead of 8: at most a fifth of the peak. With 16 columns a warp covers two rows and needs as many cycles, but tiles of
// 16 fetch twice as much and have twice as many barriers. Fewer loads need more sums a thread: v05_register_tiles.
#include "sgemm.h"

namespace minfer {

template <int kTile>
__global__ void __launch_bounds__(kTile* kTile) tiled(Sgemm g) {
  __shared__ float a_tile[kTile][kTile];
  __shared__ float b_tile[kTile][kTile];
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = blockIdx.y * kTile + y, col = blockIdx.x * kTile + x;
  float sum = 0.0f;
  for (int k0 = 0; k0 < g.k; k0 += kTile) {
    a_tile[y][x] = row < g.m && k0 + x < g.k ? g.a[row * g.lda + k0 + x] : 0.0f;
    b_tile[y][x] = k0 + y < g.k && col < g.n ? g.b[(k0 + y) * g.ldb + col] : 0.0f;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTile; ++k) sum += a_tile[y][k] * b_tile[k][x];
    __syncthreads();
  }
  if (row < g.m && col < g.n) g.c[row * g.ldc + col] = sum;
}

template <int kTile>
void launch(const Sgemm& g) {
  const dim3 grid((g.n + kTile - 1) / kTile, (g.m + kTile - 1) / kTile);
  tiled<kTile><<<grid, dim3(kTile, kTile), 0, g.stream>>>(g);
}

}  // namespace minfer

MINFER_SGEMM(sgemm_v02_tiled16, minfer::launch<16>)
MINFER_SGEMM(sgemm_v02_tiled32, minfer::launch<32>)
