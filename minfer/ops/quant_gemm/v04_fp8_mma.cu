// v04_fp8_mma: x and W in e4m3, hgemm's tiles with mma.m16n8k32; scales of rows in the epilogue.
// Idea: a row of an 8x8 matrix of ldmatrix is 16 bytes, and a lane gets two elements of a half type or four of fp8, which are
// the fragments that mma.sync takes of either. So pairs of fp8, as elements of 16 bits, go through hgemm's copies, swizzle and
// fragments unchanged, and only the instruction differs.
// Expected: on an L40S, whose mma.sync multiplies fp8 in hardware, twice v07's rate where there are enough tiles. Hopper has
// fp8 in wgmma only: here its compiler converts to fp16, for at most mma.sync's 636 TFLOP/s.
// Measured (H200, bfloat16, fp8_fp8, float32, m=n=k=8192): 330.7 TFLOP/s cold.
#include "cuda/gemm/block_tile.cuh"
#include "fp8.cuh"

namespace minfer {

#if MINFER_SM >= 90
constexpr int kWarpM = 32;  // the compiler's conversions to fp16 take registers: with 64 rows, a thread spilled 48 bytes
#else
constexpr int kWarpM = 64;
#endif

// Eight warps; 64 pairs are 128 numbers in k; three stages of 24 or 32 KB.
using Block = BlockTile<E4M3Pair, float, Layout::TN, 2 * kWarpM, 128, 64, 3, kWarpM, 32>;

template <typename Out>
__global__ void __launch_bounds__(Block::kThreads, 1) multiply(Scaled<Out> g) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int2 place = tile_of(blockIdx.x, (g.m + Block::kBlockM - 1) / Block::kBlockM,
                             (g.n + Block::kBlockN - 1) / Block::kBlockN);
  const int row0 = place.x * Block::kBlockM, col0 = place.y * Block::kBlockN;
  Block::Warp warp;
  Block::multiply(warp, g, row0, col0, 0, g.k, reinterpret_cast<E4M3Pair*>(shared));

  struct alignas(4) Two {
    Out x, y;
  };
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kWarpM / 16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + Block::warp_row() + i * 16 + half * 8 + lane / 4;
      if (row >= g.m) continue;
      const float scale = g.x_scales[row];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int col = col0 + Block::warp_col() + j * 8 + lane % 4 * 2;
        if (col >= g.n) continue;
        const float x = warp.sums[i][j][2 * half] * g.w_scales[col] * scale;
        const float y = warp.sums[i][j][2 * half + 1] * g.w_scales[col + 1] * scale;
        *reinterpret_cast<Two*>(g.y + int64_t(row) * g.n + col) = Two{Out(x), Out(y)};
      }
    }
}

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  const Scaled<T> g = make_scaled(p);
  const int64_t tiles = ((int64_t(g.m) + Block::kBlockM - 1) / Block::kBlockM) *
                        ((int64_t(g.n) + Block::kBlockN - 1) / Block::kBlockN);
  STD_TORCH_CHECK(tiles <= INT_MAX, "quant_gemm: y has more tiles than a launch has blocks");
  allow_shared(multiply<T>, Block::kBytes);
  multiply<T><<<dim3(tiles), Block::kThreads, Block::kBytes, g.stream>>>(g);
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v04_fp8_mma, false, true, minfer::launch)
