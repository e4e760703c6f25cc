// v05_register_tiles, v06_deeper_tiles: a 128x128 tile of C a block, 8x8 of it in the registers of each of 256 threads; K in
// steps of 8, or of 16.
// Idea: for one k a thread loads 8 elements of A and 8 of B and makes 64 multiply-adds: a quarter of a load for each, where
// v02 has two. All loads are 16 bytes wide. Shared memory has two stages: while one is multiplied, the next is on its way
// from global memory, A in registers, for it is transposed on the way, and B by cp.async; one barrier a step is enough.
//   A warp has 32x64 of the tile, its lanes 4x8 pieces of it, each 2x2 pieces of 4x4 that lie 16 rows and 32 columns apart.
// Neighbouring lanes read the same 16 bytes of B, and lanes two apart the same of A, so that a warp's 16-byte load
// is 128 bytes or less and takes at most two cycles. A is stored as [k][row], with four words of padding: the 32 words of
// a warp's store then lie in 32 banks.
// Expected: for each k, 64 cycles of multiply-adds in each of an SM's four partitions, and 4 loads x 2 cycles x 4
// partitions = 32 cycles of shared memory, which hide behind them. Beside 64 multiply-adds a warp issues 4 loads a k, and
// about 40 instructions a step: 64 / (64 + 4 + 40 / 8) = 0.88 of 67 TFLOP/s with steps of 8, 0.91 with 16. 1024 tiles at 4096
// are 3.9 waves of 264 blocks: times 0.97.
// Measured (H200, float32, m=n=k=8192): 43.40 TFLOP/s cold; 84.5 % of torch.
#include "cuda/mma.cuh"
#include "sgemm.h"

namespace minfer {

constexpr int kBlockM = 128, kBlockN = 128, kThreads = 256;
constexpr int kRowOfA = kBlockM + 4;  // words of one k in shared memory
constexpr int kGroup = 8;             // rows of tiles that run together: they share B's tiles in the L2

template <int kBlockK>
struct Stage {
  float a[kBlockK][kRowOfA];
  float b[kBlockK][kBlockN];
};

// A thread's 16-byte pieces of the next stage, each 8 k after the one before.
template <int kBlockK>
struct Pieces {
  static constexpr int kCount = kBlockK / 8;
  const float* a;
  const float* b;
  int a_left, b_left;  // how much of K there is from the first piece on; 0 beyond the edge of the matrix
  float4 piece[kCount];

  static __device__ int k_of_a() { return threadIdx.x % 2 * 4; }
  static __device__ int k_of_b() { return threadIdx.x / 32; }

  __device__ Pieces(const Sgemm& g, int row0, int col0) {
    const int row = row0 + threadIdx.x / 2, col = col0 + threadIdx.x % 32 * 4;
    a_left = row < g.m ? g.k - k_of_a() : 0, b_left = col < g.n ? g.k - k_of_b() : 0;  // n is a multiple of 4
    a = g.a + row * g.lda + k_of_a();
    b = g.b + k_of_b() * g.ldb + col;
  }

  // Asks for the pieces, those of B straight to `stage`, and goes on to those of the next step.
  __device__ void load(const Sgemm& g, Stage<kBlockK>& stage) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool inside = 8 * i < b_left;  // a copy that is not reads nothing, but its address must be one
      cp_async_16(&stage.b[k_of_b() + 8 * i][threadIdx.x % 32 * 4], inside ? b + 8 * i * g.ldb : g.b, inside);
      piece[i] = 8 * i < a_left ? *reinterpret_cast<const float4*>(a + 8 * i) : make_float4(0, 0, 0, 0);
    }
    cp_async_commit();
    a += kBlockK, b += kBlockK * g.ldb;
    a_left -= kBlockK, b_left -= kBlockK;
  }

  // Waits for the pieces of B and stores those of A; after a barrier the stage is there.
  __device__ void store(Stage<kBlockK>& stage) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float* to = &stage.a[k_of_a() + 8 * i][threadIdx.x / 2];
      to[0] = piece[i].x, to[kRowOfA] = piece[i].y, to[2 * kRowOfA] = piece[i].z, to[3 * kRowOfA] = piece[i].w;
    }
    cp_async_wait<0>();
  }
};

// Copies 16 bytes.
__device__ inline void copy_4(float* to, const float* from) {
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
}

template <int kBlockK>
__global__ void __launch_bounds__(kThreads, 2) register_tiles(Sgemm g, int tiles_m, int tiles_n) {
  __shared__ __align__(16) Stage<kBlockK> stages[2];
  // Tiles run down kGroup rows of tiles, then along: those in flight at once need few different rows and columns.
  const int tile = blockIdx.x, group = tile / (kGroup * tiles_n), within = tile % (kGroup * tiles_n);
  const int rows = min(kGroup, tiles_m - group * kGroup);
  const int row0 = (group * kGroup + within % rows) * kBlockM, col0 = within / rows * kBlockN;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / 2 * 32 + (lane / 16 * 2 + lane % 2) * 4, col = warp % 2 * 64 + lane / 2 % 8 * 4;

  Pieces<kBlockK> pieces(g, row0, col0);
  float sums[8][8] = {};
  pieces.load(g, stages[0]);
  pieces.store(stages[0]);
  __syncthreads();

  int current = 0;
  for (int left = g.k; left > 0; left -= kBlockK) {
    const bool more = left > kBlockK;
    if (more) pieces.load(g, stages[current ^ 1]);  // it was read one step ago, and all threads have met since
#pragma unroll
    for (int k = 0; k < kBlockK; ++k) {  // unrolled, the compiler has the loads of a k under way before those of the last
      const Stage<kBlockK>& stage = stages[current];
      float a[8], b[8];
      copy_4(a, &stage.a[k][row]), copy_4(a + 4, &stage.a[k][row + 16]);
      copy_4(b, &stage.b[k][col]), copy_4(b + 4, &stage.b[k][col + 32]);
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] += a[i] * b[j];
    }
    current ^= 1;
    if (more) pieces.store(stages[current]);
    __syncthreads();  //@ stage_read
  }

#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at_row = row0 + row + i / 4 * 16 + i % 4;
    if (at_row >= g.m) continue;
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const int at_col = col0 + col + j / 4 * 32;
      if (at_col < g.n) copy_4(g.c + at_row * g.ldc + at_col, &sums[i][j]);
    }
  }
}

template <int kBlockK>
void launch(const Sgemm& g) {
  check_pieces(g.a, g.k, g.lda, "sgemm: a");
  check_pieces(g.b, g.n, g.ldb, "sgemm: b");
  check_pieces(g.c, g.n, g.ldc, "sgemm: out");
  const int tiles_m = (g.m + kBlockM - 1) / kBlockM, tiles_n = (g.n + kBlockN - 1) / kBlockN;
  register_tiles<kBlockK><<<tiles_m * tiles_n, kThreads, 0, g.stream>>>(g, tiles_m, tiles_n);
}

}  // namespace minfer

MINFER_SGEMM(sgemm_v05_register_tiles, minfer::launch<8>)
MINFER_SGEMM(sgemm_v06_deeper_tiles, minfer::launch<16>)
