// v02_gemv: 1 or 2 rows of x. A warp streams 16 rows of W through its own part of shared memory into fragments of mma.sync.
// Idea: memory's speed needs bytes in flight, and cp.async keeps them in flight without registers. Eight warps of a block share
// the k of 16 rows, each with 2 to 4 pieces of 256 weights in flight, and with no barrier but those for their sums. Tensor
// cores multiply integers (`fragments.cuh`), so an int4 weight in bfloat16 costs half a lop3 and no conversion. x is put in the
// order of the fragments once for each block. Blocks are persistent: each goes from 16 rows to its next 16 without draining its
// copies. Where x does not fit, or W has too few rows, blocks share k too: they write partial sums, which the last block adds
// in order. The code takes up to 8 rows of x, but with 4 v03_mma is faster: 29.0 against 43.8 us in the tuning run.
// Expected (int4, group 128): 28672 x 4096 at m = 1 reads 62 MB, 13.4 us at 4.66 TB/s. 16 warps an SM have 96 KB in flight, and
// 4.66 TB/s x 700 ns / 132 SMs needs 25 KB, so memory should be the limit: 18 us with launch and last bytes. Tuning run on an
// H200: 24.9 us.
// Measured (H200, bfloat16, int4_g128, float32, m=2, n=28672, k=4096): 18.59 TFLOP/s cold.
#include "fragments.cuh"
#include "cuda/counters.cuh"
#include "cuda/shared_tile.cuh"

namespace minfer {

constexpr int kMostM = 8, kRows = 16, kWarps = 8, kThreads = 32 * kWarps, kBlocksPerSM = 2;
// Shared memory of a block for weights and x, without the 8.1 KB for the sums of warps. An SM of Hopper holds two blocks, other
// SMs one. With int4, a row of 14336 x fits on Hopper.
constexpr int kShared = (kMostShared > 113 << 10 ? 113 << 10 : kMostShared) - (33 << 8);

// The memory of a block with `pieces` pieces of k: a ring for each warp, x, and its sums.
template <typename F>
struct Memory {
  static constexpr int kStages = Piece<F>::kSlot <= 144 ? 4 : 2, kStage = kRows * Piece<F>::kSlot;
  static constexpr int kRings = kWarps * kStages * kStage;

  // Bytes of a row of x: 64 more than a multiple of all banks, so that two rows that a quarter warp reads are in different
  // banks.
  __host__ __device__ static int row(int pieces) { return pieces * kPiece * 2 + 64; }
  static int bytes(int m, int pieces) { return kRings + m * row(pieces) + pieces * kSums<F> * kMostM * 4; }
};

struct Share {
  int splits, pieces;  // how many blocks share the k of a row, and how many pieces each has
  int tiles;
  float* parts;
  unsigned* counters;
};

template <typename F, typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM) gemv(Product<F, T> p, Share share) {
  using Of = Memory<F>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float sums_of_warps[2][kWarps][kRows * kMostM];
  __shared__ bool last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
  const int split = blockIdx.x % share.splits, stride = gridDim.x / share.splits;
  const int first = split * share.pieces, pieces = min(share.pieces, p.k / kPiece - first);
  uint8_t* ring = shared + warp * Of::kStages * Of::kStage;
  uint8_t* x_rows = shared + Of::kRings;
  float* x_sums = reinterpret_cast<float*>(x_rows + p.m * Of::row(share.pieces));

  // Starts the next copies of this warp: every eighth piece of a tile of 16 rows.
  int next_tile = warp < pieces ? blockIdx.x / share.splits : share.tiles, next_piece = warp, filled = 0, used = 0;
  Copies<F, T> copies(p, int64_t(next_tile) * kRows, first + warp, lane);
  const auto copy = [&] {
    if (next_tile < share.tiles) {
      copies.start(ring + filled * Of::kStage);
      int64_t more = kWarps;
      if ((next_piece += kWarps) >= pieces) {
        more += warp - next_piece + int64_t(stride) * kRows * (p.k / kPiece);
        next_piece = warp, next_tile += stride, copies.rows -= stride * kRows;
      }
      copies.skip(more);
    }
    cp_async_commit();  // an empty group too, so that the number of groups in flight is constant
    if (++filled == Of::kStages) filled = 0;
  };
  for (int stage = 0; stage < Of::kStages - 1; ++stage) copy();

  // Each warp puts pieces of x in order, each lane eight x of four pieces at once, so that it waits for memory once.
  const int all = p.m * pieces;
  for (int i = warp; i < all; i += 4 * kWarps) {
    uint4 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = min(i + j * kWarps, all - 1), row = at / pieces, piece = at % pieces;
      x[j] = ordered_x<F, T>(p.x + int64_t(row) * p.k + (first + piece) * kPiece + lane / 4 * 32, t);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = i + j * kWarps, row = at / pieces, piece = at % pieces;
      if (at >= all) break;
      *reinterpret_cast<uint4*>(x_rows + row * Of::row(share.pieces) + piece * (kPiece * 2) + lane * 16) = x[j];
      if constexpr (kSummed<F> > 0) add_up<F, T>(x_sums + piece * kSums<F> * kMostM + row, kMostM, x[j], lane);
    }
  }
  __syncthreads();

  // Rows of x beyond the last are the last again: a product's columns are independent, and theirs are not stored.
  const uint8_t* my_x = x_rows + min(lane / 4, p.m - 1) * Of::row(share.pieces) + t * 16;
  int phase = 0;
  for (int tile = blockIdx.x / share.splits; tile < share.tiles; tile += stride, phase ^= 1) {
    float sums[1][4] = {};
    for (int piece = warp; piece < pieces; piece += kWarps) {
      cp_async_wait<Of::kStages - 2>();
      __syncwarp();  // the copies of all lanes have arrived, and all are done with the stage that is filled next
      copy();
      const uint8_t* low = ring + used * Of::kStage + lane / 4 * Piece<F>::kSlot + start_in_slot<F>(first + piece);
      multiply_piece<F, T>(
          sums, low, low + 8 * Piece<F>::kSlot,
          [&](int, int block) {
            return *reinterpret_cast<const uint4*>(my_x + (piece * 8 + block) * 64);
          },
          [&](int, int group) {
            return *reinterpret_cast<const float2*>(x_sums + (piece * kSums<F> + group) * kMostM + 2 * t);
          });
      if (++used == Of::kStages) used = 0;
    }

    float* mine = sums_of_warps[phase][warp];
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[(2 * t + i % 2) * kRows + lane / 4 + i / 2 * 8] = sums[0][i];
    __syncthreads();  // all have read the other half of `sums_of_warps`
    const int row = threadIdx.x / kRows;
    const int64_t col = int64_t(tile) * kRows + threadIdx.x % kRows;
    const bool stores = row < p.m && col < p.n;  // the first 128 threads at most
    float sum = 0.0f;
    if (stores)
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += sums_of_warps[phase][w][threadIdx.x];
    if (share.splits > 1) {
      float* parts = share.parts + int64_t(tile) * (share.splits * kRows * kMostM);
      if (stores) __stcg(parts + split * (kRows * kMostM) + threadIdx.x, sum);
      __threadfence();
      __syncthreads();  // all threads have written before one reports it
      if (threadIdx.x == 0)
        last = atomicInc(share.counters + tile, share.splits - 1) == unsigned(share.splits) - 1;
      __syncthreads();
      if (!last) continue;
      __threadfence();
      sum = 0.0f;
      if (stores)
#pragma unroll 4  // that many loads at once
        for (int s = 0; s < share.splits; ++s) sum += __ldcg(parts + s * (kRows * kMostM) + threadIdx.x);  //@ split
    }
    if (stores) {
      if constexpr (kIsFp8<F>) sum *= p.weights.scales[col];
      p.y[int64_t(row) * p.n + col] = T(sum);
    }
  }
  cp_async_wait<0>();
}

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  using Of = Memory<F>;
  require_pieces(p);
  STD_TORCH_CHECK(p.m <= kMostM, "quant_gemm: x must have at most ", kMostM, " rows for this kernel, got ", p.m);
  const int all = p.k / kPiece, blocks = kBlocksPerSM * multiprocessors();
  Share share{1, all, (p.n - 1) / kRows + 1, nullptr, nullptr};
  const auto divide = [&](int splits) {
    share.pieces = (all + splits - 1) / splits;
    share.splits = (all + share.pieces - 1) / share.pieces;
  };
  // Every block has rows, if that leaves each warp a piece; and x fits.
  if (share.tiles < blocks) divide(std::max(1, std::min(blocks / share.tiles, all / kWarps)));
  for (int splits = share.splits; Of::bytes(p.m, share.pieces) > kShared; divide(++splits)) {
  }
  STD_TORCH_CHECK(share.splits == 1 || share.tiles <= kMostCounters, "quant_gemm: w must have at most ", kMostCounters * kRows,
                  " rows where blocks share k, got ", p.n);
  const auto parts = scratch_words(share.splits > 1 ? int64_t(share.tiles) * share.splits * kRows * kMostM : 0);
  share.parts = static_cast<float*>(parts.mutable_data_ptr());
  if (share.splits > 1) share.counters = counters_of(p.stream);
  const int groups = std::min(share.tiles, std::max(1, blocks / share.splits));
  const int bytes = Of::bytes(p.m, share.pieces);
  allow_shared(gemv<F, T>, bytes);
  gemv<F, T><<<dim3(groups * share.splits), kThreads, bytes, p.stream>>>(p, share);
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v02_gemv, true, false, minfer::launch)
