// v05_register_tiles: a 128x128 tile of C a block, 8x8 of it in the registers of each of 256 threads, K in steps of 8.
// Idea: for one k a thread loads 8 elements of A and 8 of B and makes 64 multiply-adds: a quarter of a load for each, where
// v02 has two. All loads are 16 bytes wide. Shared memory has two stages: while one is multiplied, the next is on its way
// from global memory in registers, and one barrier a step is enough.
//   A warp has 32x64 of the tile, its lanes 4x8 pieces of it, each 2x2 pieces of 4x4 that lie 16 rows and 32 columns apart.
// Neighbouring lanes read the same 16 bytes of B, and lanes two apart the same of A, so that a warp's 16-byte load
// is 128 bytes or less and takes at most two cycles. A is stored transposed, [k][row], with four words of padding: the 32
// words of a warp's store then lie in 32 banks.
// Expected: for each k, 64 cycles of multiply-adds in each of an SM's four partitions, and 4 loads x 2 cycles x 4
// partitions = 32 cycles of shared memory, which hide behind them. Besides 64 multiply-adds a warp issues 4 loads a k, and
// about 20 instructions every 8 k: 64 / 66.5 of the issue slots are multiply-adds, 0.96 of 67 TFLOP/s at best, and 1024
// tiles at 4096 are 3.9 waves of 264 blocks: 0.97. At least 0.9 of cuBLAS. Measured: see docs/sgemm.md.
#include "sgemm.h"

namespace minfer {

constexpr int kBlockM = 128, kBlockN = 128, kBlockK = 8, kThreads = 256;
constexpr int kRowOfA = kBlockM + 4;  // words of one k in shared memory
constexpr int kGroup = 8;             // block rows whose tiles are neighbours in time: they share B's tiles in the L2

struct Stage {
  float a[kBlockK][kRowOfA];
  float b[kBlockK][kBlockN];
};

// The pieces of the next stage, in registers: 16 bytes of a row of A, and of a row of B.
struct Pieces {
  const float* a;
  const float* b;
  int k_of_a, k_of_b;  // of the piece
  int64_t step_b;
  bool a_inside, b_inside;
  float4 a_piece, b_piece;

  __device__ Pieces(const Sgemm& g, int row0, int col0) {
    const int row = row0 + threadIdx.x / 2, col = col0 + threadIdx.x % 32 * 4;
    k_of_a = threadIdx.x % 2 * 4, k_of_b = threadIdx.x / 32;
    a_inside = row < g.m, b_inside = col < g.n;  // n is a multiple of 4
    a = g.a + (a_inside ? row : 0) * g.lda + k_of_a;
    b = g.b + k_of_b * g.ldb + (b_inside ? col : 0);
    step_b = kBlockK * g.ldb;
  }

  // Asks for the pieces of the step that has so many k left, and goes on to the next one.
  __device__ void load(int left) {
    a_piece = a_inside && k_of_a < left ? *reinterpret_cast<const float4*>(a) : make_float4(0, 0, 0, 0);
    b_piece = b_inside && k_of_b < left ? *reinterpret_cast<const float4*>(b) : make_float4(0, 0, 0, 0);
    a += kBlockK, b += step_b;
  }

  __device__ void store(Stage& stage) const {
    const int row = threadIdx.x / 2;
    stage.a[k_of_a][row] = a_piece.x, stage.a[k_of_a + 1][row] = a_piece.y;
    stage.a[k_of_a + 2][row] = a_piece.z, stage.a[k_of_a + 3][row] = a_piece.w;
    *reinterpret_cast<float4*>(&stage.b[k_of_b][threadIdx.x % 32 * 4]) = b_piece;
  }
};

// What a thread multiplies at one k: rows `row` to `row` + 3 and 16 further, columns `col` to `col` + 3 and 32 further.
struct Fragment {
  float a[8], b[8];

  __device__ void load(const Stage& stage, int k, int row, int col) {
    *reinterpret_cast<float4*>(a) = *reinterpret_cast<const float4*>(&stage.a[k][row]);
    *reinterpret_cast<float4*>(a + 4) = *reinterpret_cast<const float4*>(&stage.a[k][row + 16]);
    *reinterpret_cast<float4*>(b) = *reinterpret_cast<const float4*>(&stage.b[k][col]);
    *reinterpret_cast<float4*>(b + 4) = *reinterpret_cast<const float4*>(&stage.b[k][col + 32]);
  }
};

__global__ void __launch_bounds__(kThreads, 2) register_tiles(Sgemm g, int tiles_m, int tiles_n) {
  __shared__ __align__(16) Stage stages[2];
  // Tiles run down kGroup rows of tiles, then along: those in flight at once need few different rows and columns.
  const int tile = blockIdx.x, group = tile / (kGroup * tiles_n), within = tile % (kGroup * tiles_n);
  const int rows = min(kGroup, tiles_m - group * kGroup);
  const int row0 = (group * kGroup + within % rows) * kBlockM, col0 = within / rows * kBlockN;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / 2 * 32 + (lane / 16 * 2 + lane % 2) * 4, col = warp % 2 * 64 + lane / 2 % 8 * 4;

  Pieces pieces(g, row0, col0);
  Fragment fragments[2];
  float sums[8][8] = {};
  pieces.load(g.k);
  pieces.store(stages[0]);
  __syncthreads();
  fragments[0].load(stages[0], 0, row, col);

  int current = 0;
  for (int left = g.k; left > 0; left -= kBlockK) {
    const bool more = left > kBlockK;
    if (more) pieces.load(left - kBlockK);
#pragma unroll
    for (int k = 0; k < kBlockK; ++k) {
      if (k + 1 < kBlockK) {
        fragments[(k + 1) % 2].load(stages[current], k + 1, row, col);
      } else if (more) {  // the other stage was read one step ago, and all threads have met since
        pieces.store(stages[current ^ 1]);
        __syncthreads();
        fragments[(k + 1) % 2].load(stages[current ^ 1], 0, row, col);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] += fragments[k % 2].a[i] * fragments[k % 2].b[j];
    }
    current ^= 1;
  }

#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at_row = row0 + row + i / 4 * 16 + i % 4;
    if (at_row >= g.m) continue;
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const int at_col = col0 + col + j / 4 * 32;
      if (at_col < g.n)
        *reinterpret_cast<float4*>(g.c + at_row * g.ldc + at_col) =
            make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
    }
  }
}

void launch(const Sgemm& g) {
  check_pieces(g.a, g.k, g.lda, "sgemm: a");
  check_pieces(g.b, g.n, g.ldb, "sgemm: b");
  check_pieces(g.c, g.n, g.ldc, "sgemm: out");
  const int tiles_m = (g.m + kBlockM - 1) / kBlockM, tiles_n = (g.n + kBlockN - 1) / kBlockN;
  register_tiles<<<tiles_m * tiles_n, kThreads, 0, g.stream>>>(g, tiles_m, tiles_n);
}

}  // namespace minfer

MINFER_SGEMM(sgemm_v05_register_tiles, minfer::launch)
