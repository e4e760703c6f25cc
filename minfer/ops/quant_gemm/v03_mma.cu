// v03_mma: any number of rows of x, 8, 16, 32 or, with 4 bits, 64 a block; the mainloop decodes weights to mma fragments.
// Idea: v02's fragments, in a block whose warps share x: 16 rows of W for each warp, and pieces of 256 in k, which cp.async
// loads into two to four stages. A warp decodes its fragments of W once and multiplies them with all rows of x in the block, so
// that decoding a weight once serves 8 to 64 products. Each warp puts the rows of x that it has copied in the order of the
// fragments, and sums them, once for all warps; with three stages or more it does so a piece ahead, and there is one barrier a
// piece. With 4 bits and more than 8 rows of x, an SM of Hopper has one block of 14 or 16 warps (8 at 64 rows) with 226 KB. In
// other cases it has two blocks of 7 or 8 warps (4 at 32 rows), and an SM with less memory has one, of up to 98 KB. Where
// tiles are few, several blocks divide the k of a tile among them so that all run in one wave; the last of them to finish adds
// the partial sums in order.
// Expected (int4, group 128, 28672 x 4096): m = 16 in 20 us on an H200: all tiles at once stream 62 MB in 13.4 us, which hides
// the decoding and half of the tensor cores' 6 us. At m = 64 the products take 24 us at mma.sync's rate. With more rows of x,
// W is decoded again for each 64 of them. Tuning run on an H200: 34.0 us at m = 16, 94.4 at m = 64.
// x in fp8 is decoded to fragments as W is, so fp8 times fp8 has fp32 sums on GPUs without fp8 products.
// Measured (H200, bfloat16, int4_g128, float32, m=16, n=4096, k=4096): 42.18 TFLOP/s cold.
#include "fragments.cuh"
#include "cuda/counters.cuh"
#include "cuda/shared_tile.cuh"

namespace minfer {

// With 4 bits, x is a large share of what a block copies. So one block of twice the warps has all memory of a Hopper SM: it
// copies x once where two blocks copy it twice. With 8 bits, and with up to 8 rows of x, two blocks are as fast or faster.
template <typename F>
constexpr bool kFourBits = Piece<F>::kSlot <= 144;
template <typename F, int kM>
constexpr bool kOneBlock = kFourBits<F> && kM > 8 && kMostShared >= 227 << 10;

// Shared memory of a block: all, or that of which an SM of Hopper holds two and another SM one.
template <typename F, int kM>
constexpr int kMemory = kOneBlock<F, kM> ? 226 << 10 : kMostShared > 113 << 10 ? 113 << 10 : 98 << 10;

// kM rows of x and 16 of W for each warp; both are copied in pieces of kPiece.
template <typename F_, typename T_, int kM_, int kWarps_>
struct Tile {
  using F = F_;
  using T = T_;
  static constexpr int kM = kM_, kTiles = kM / 8;
  static constexpr int kWarps = kWarps_, kRows = 16 * kWarps, kThreads = 32 * kWarps;
  using X = typename Product<F, T>::X;
  static constexpr bool kOrders = sizeof(X) == 2;  // x in fp8 is decoded, and so put in order, by each warp
  // Rows of x are padded beyond a multiple of all banks. So the lanes that read at once are in different banks: a quarter
  // warp of 16 bytes each, or a warp of 4.
  static constexpr int kRowX = kPiece * sizeof(X) + (kOrders ? 64 : 16);
  static constexpr int kCopiesX = kPiece * sizeof(X) / 16;
  static constexpr int kSumsAt = kRows * Piece<F>::kSlot + kM * kRowX, kStage = kSumsAt + kSums<F> * kM * 4;
  static constexpr int kWeights = kRows * Piece<F>::kSlot;
  static constexpr int kFit = kMemory<F, kM> / kStage, kStages = kFit > 4 ? 4 : kFit, kBytes = kStages * kStage;
  static constexpr int kAhead = kOrders && kStages > 2 ? 1 : 0;  // pieces that x is put in order ahead of its products
  // On sm_89 memory allows no second block. Unless told so, the compiler spills a register of `q4_k` for the sake of more.
  static constexpr int kLeastBlocks = kMostShared == 99 << 10 && kM == 8 ? 1 : 0;
  static_assert(kStages >= 2 && kBytes <= kMostShared);
};

struct Parts {
  int tiles_m, tiles_n, splits, pieces;
  float* sums;
  unsigned* counters;
};

// Puts in order, where they are, and sums those x of a stage that this warp has copied: every kWarps-th row from its first on,
// whose x and sum are given. A lane reads eight x of a row `from_at` and writes them `to_at` bytes behind its first.
template <typename Tile>
__device__ inline void order_x(uint8_t* of_warp, float* sums, int warp, int from_at, int to_at, int lane) {
  using F = typename Tile::F;
#pragma unroll
  for (int i = 0; i < Tile::kM; i += Tile::kWarps) {
    if (Tile::kM % Tile::kWarps > 0 && warp + i >= Tile::kM) continue;
    const uint8_t* from = of_warp + from_at + i * Tile::kRowX;
    const uint4 ordered = in_order<F>(*reinterpret_cast<const uint2*>(from),
                                      *reinterpret_cast<const uint2*>(from + (kIsInt4<F> ? 8 : 32)));
    if constexpr (!kIsInt4<F>) __syncwarp();  // all have read, where others write
    *reinterpret_cast<uint4*>(of_warp + to_at + i * Tile::kRowX) = ordered;
    if constexpr (kSums<F> > 0) add_up<F, typename Tile::T>(sums + i, Tile::kM, ordered, lane);
  }
}

// Writes this block's sums. In the block that arrives last, replaces them by the sums of all blocks and returns true; in the
// others returns false.
template <typename Tile>
__device__ bool add_up_parts(float (&sums)[Tile::kTiles][4], const Parts& parts, int tile, int split) {
  constexpr int kAll = Tile::kTiles * Tile::kThreads;
  // One product, (tile * splits + split) * kAll, would spill a register of `q4_k` on sm_90a.
  const int64_t first = int64_t(tile) * parts.splits * kAll + split * kAll;
  float4* mine = reinterpret_cast<float4*>(parts.sums) + first + threadIdx.x;
#pragma unroll
  for (int i = 0; i < Tile::kTiles; ++i)
    __stcg(mine + i * Tile::kThreads, float4{sums[i][0], sums[i][1], sums[i][2], sums[i][3]});
  __threadfence();
  __syncthreads();  // all threads have written before one reports it
  __shared__ bool last;
  if (threadIdx.x == 0)
    last = atomicInc(parts.counters + tile, parts.splits - 1) == unsigned(parts.splits) - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
#pragma unroll
  for (int i = 0; i < Tile::kTiles; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
#pragma unroll 4  // that many loads at once
  for (int s = 0; s < parts.splits; ++s)
#pragma unroll
    for (int i = 0; i < Tile::kTiles; ++i) {
      const float4 part = __ldcg(mine + (s - split) * kAll + i * Tile::kThreads);
      sums[i][0] += part.x, sums[i][1] += part.y, sums[i][2] += part.z, sums[i][3] += part.w;
    }
  return true;
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kLeastBlocks)
    multiply(Product<typename Tile::F, typename Tile::T> p, Parts parts) {
  using F = typename Tile::F;
  using T = typename Tile::T;
  using X = typename Tile::X;
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
  const int tile = blockIdx.x / parts.splits, split = blockIdx.x % parts.splits;
  const int row0 = tile % parts.tiles_m * Tile::kM;  // neighbours read the same W
  const int64_t col0 = int64_t(tile / parts.tiles_m) * Tile::kRows + warp * 16;
  const int first = split * parts.pieces, end = min(first + parts.pieces, p.k / kPiece);

  Copies<F, T> copies(p, col0, first, lane);
  constexpr int kStep = Tile::kThreads / Tile::kCopiesX;  // rows of x at once: each warp copies one, or two of fp8
  const int row = threadIdx.x / Tile::kCopiesX, at = threadIdx.x % Tile::kCopiesX;
  const X* x_from = p.x + int64_t(row0 + row) * p.k + first * kPiece + at * (16 / sizeof(X));
  const int x_to = kept(Tile::kWeights + row * Tile::kRowX + at * 16);
  // Offsets of the stage that is filled next, and of the one whose products are next.
  int filled = 0, used = 0;
  const auto after = [](int stage) { return stage + Tile::kStage == Tile::kBytes ? 0 : stage + Tile::kStage; };
  const auto copy = [&](int piece) {
    if (piece < end) {
      uint8_t* stage = shared + filled;
      copies.start(stage + warp * 16 * Piece<F>::kSlot);
      copies.skip(1);
#pragma unroll
      for (int i = 0; i < Tile::kM; i += kStep)
        if (Tile::kM % kStep == 0 || row + i < Tile::kM)
          cp_async_16(stage + x_to + i * Tile::kRowX, x_from + int64_t(i) * p.k, row0 + row + i < p.m);
      x_from += kPiece;
    }
    filled = after(filled);
    cp_async_commit();  // an empty group too, so that the number of groups in flight is constant
  };

  float sums[Tile::kTiles][4] = {};
  for (int i = 0; i < Tile::kStages - 1; ++i) copy(first + i);
  // With two stages, x is put in order before the barrier after which others read it; with more, a piece ahead, so that its
  // latency passes under products.
  const int of_warp = kept(Tile::kWeights + warp * Tile::kRowX), sum_of_warp = kept(Tile::kSumsAt + warp * 4);
  const int from_at = kept(lane / 4 * 64 + t * (kIsInt4<F> ? 16 : 8)), to_at = kept(lane * 16);
  const auto order = [&](int piece, int stage) {
    if constexpr (Tile::kOrders)
      if (piece < end) {
        __syncwarp();  // the copies of all lanes have arrived
        order_x<Tile>(shared + stage + of_warp, reinterpret_cast<float*>(shared + stage + sum_of_warp), warp, from_at, to_at,
                      lane);
      }
  };
  const int low_at = kept((warp * 16 + lane / 4) * Piece<F>::kSlot);
  const int x_at = kept(Tile::kWeights + lane / 4 * Tile::kRowX + (Tile::kOrders ? t * 16 : 0));
  const int sums_at = kept(Tile::kSumsAt + t * 8);
  if constexpr (Tile::kAhead > 0) cp_async_wait<Tile::kStages - 2>(), order(first, 0);
  for (int piece = first; piece < end; ++piece) {
    cp_async_wait<Tile::kStages - 2 - Tile::kAhead>();
    if constexpr (Tile::kAhead == 0) order(piece, used);
    //@ arrived
    __syncthreads();  // the copies of all threads have arrived, and all are done with the stage that is filled next
    copy(piece + Tile::kStages - 1);
    if constexpr (Tile::kAhead > 0) order(piece + 1, after(used));
    const uint8_t *stage = shared + used, *x = stage + x_at, *x_sums = stage + sums_at;
    const uint8_t* low = stage + low_at + start_in_slot<F>(piece);
    multiply_piece<F, T>(
        sums, low, low + 8 * Piece<F>::kSlot,
        [&](int i, int block) {
          const uint8_t* row = x + i * 8 * Tile::kRowX;
          if constexpr (Tile::kOrders) return *reinterpret_cast<const uint4*>(row + block * 64);
          else return ordered_x<F, T>(row + block * 32, t);
        },
        [&](int i, int group) {
          return *reinterpret_cast<const float2*>(x_sums + (group * Tile::kM + i * 8) * 4);
        });
    used = after(used);
  }
  cp_async_wait<0>();

  if (parts.splits > 1 && !add_up_parts<Tile>(sums, parts, tile, split)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t col = col0 + lane / 4 + half * 8;
    if (col >= p.n) continue;
    float scale = 1.0f;
    if constexpr (kIsFp8<F>) scale = p.weights.scales[col];
#pragma unroll
    for (int i = 0; i < Tile::kTiles; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = row0 + i * 8 + 2 * t + e;
        if (row >= p.m) continue;
        float sum = sums[i][half * 2 + e] * scale;
        if constexpr (std::is_same_v<F, Fp8Both>) sum *= p.x_scales[row];  //@ scale_of_row
        p.y[int64_t(row) * p.n + col] = T(sum);
      }
  }
}

template <typename Of>
Parts parts_of(const Product<typename Of::F, typename Of::T>& p) {
  constexpr int kM = Of::kM;
  const int all = p.k / kPiece;
  Parts parts{(p.m + kM - 1) / kM, (p.n + Of::kRows - 1) / Of::kRows, 1, all, nullptr, nullptr};
  const int64_t tiles = int64_t(parts.tiles_m) * parts.tiles_n;
  allow_shared(multiply<Of>, Of::kBytes);
  int at_once = 0;
  STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, multiply<Of>, Of::kThreads, Of::kBytes));
  const int64_t wanted = tiles > kMostCounters ? 1 : int64_t(std::max(1, at_once)) * multiprocessors() / tiles;
  if (wanted > 1) {  // two pieces each at least
    parts.pieces = std::max<int>(2, (all + wanted - 1) / wanted);
    parts.splits = (all + parts.pieces - 1) / parts.pieces;
  }
  STD_TORCH_CHECK(tiles * parts.splits <= INT_MAX, "quant_gemm: y has more tiles than a launch has blocks");
  return parts;
}

template <typename Of>
void launch_parts(const Product<typename Of::F, typename Of::T>& p, Parts parts) {
  const int64_t blocks = int64_t(parts.tiles_m) * parts.tiles_n * parts.splits;
  const auto sums = scratch_words(parts.splits > 1 ? blocks * Of::kM * Of::kRows : 0);
  parts.sums = static_cast<float*>(sums.mutable_data_ptr());
  if (parts.splits > 1) parts.counters = counters_of(p.stream);
  multiply<Of><<<dim3(blocks), Of::kThreads, Of::kBytes, p.stream>>>(p, parts);
}

// The weights, times 16, that the multiprocessor with most blocks multiplies.
template <typename Of>
int64_t most(const Parts& parts) {
  const int64_t blocks = int64_t(parts.tiles_m) * parts.tiles_n * parts.splits, sms = multiprocessors();
  return (blocks + sms - 1) / sms * parts.pieces * Of::kWarps;
}

// Blocks of 8 warps, or of 7 where those are dealt out more evenly: 28672 rows are 224 blocks of 8, for which 132
// multiprocessors have two each or one, but 256 of 7. Where a multiprocessor has one block, of 16 warps or of 14: 28672 rows
// are 112 blocks of 16, but 128 of 14.
template <int kM, typename F, typename T>
void launch_few(const Product<F, T>& p) {
  constexpr int kBlocks = kOneBlock<F, kM> ? 2 : 1;  // that one block stands for
  using Eight = Tile<F, T, kM, 8 * kBlocks>;
  using Seven = Tile<F, T, kM, 7 * kBlocks>;
  const Parts eight = parts_of<Eight>(p), seven = parts_of<Seven>(p);
  if (most<Seven>(seven) < most<Eight>(eight)) launch_parts<Seven>(p, seven);
  else launch_parts<Eight>(p, eight);
}

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  require_pieces(p);
  if (p.m <= 8) return launch_few<8>(p);
  if (p.m <= 16) return launch_few<16>(p);
  if constexpr (kFourBits<F>)  // with 8, two stages of 64 rows do not fit a block
    if (p.m > 32) {
      using Of = Tile<F, T, 64, kOneBlock<F, 64> ? 8 : 4>;
      return launch_parts<Of>(p, parts_of<Of>(p));
    }
  using Of = Tile<F, T, 32, !kFourBits<F> ? 4 : kOneBlock<F, 32> ? 16 : 8>;
  launch_parts<Of>(p, parts_of<Of>(p));
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v03_mma, true, true, minfer::launch)
