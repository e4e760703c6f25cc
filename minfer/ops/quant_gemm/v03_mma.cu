// v03_mma: any number of rows of x, 16, 32 or, with 4 bits, 64 a block; the mainloop decodes weights to mma fragments.
// Idea: v02's fragments, in a block whose warps share x: 128 or 64 rows of W, 16 for each warp, and pieces of 256 in k, which
// cp.async loads into two or three stages. A warp decodes its fragments of W once and multiplies them with all rows of x in the
// block, so that decoding a weight once serves 16 to 64 products. Where tiles are few, several blocks divide the k of a tile
// among them so that all run in one wave; the last of them to finish adds the partial sums in order.
// Expected (int4, group 128, 28672 x 4096): m = 16 in 20 us on an H200: 224 blocks at once, with 110 KB in flight an SM, stream
// 62 MB in 13.4 us, which hides the decoding and half of the tensor cores' 6 us. At m = 64 the products take 24 us at
// mma.sync's rate. With more rows of x, W is decoded again for each 64 of them: 2.2 instructions a weight take 9 us, next to
// 24 us of products. x in fp8 is decoded to fragments as W is, so fp8 times fp8 has fp32 sums on GPUs without fp8 products.
#include "fragments.cuh"
#include "ops/hgemm/scratch.cuh"
#include "cuda/shared_tile.cuh"

namespace minfer {

constexpr int kMemory = 98 << 10;  // of a block, within the 99 KB of sm_89; an SM of Hopper holds two blocks

// kM rows of x and kRows of W; both are copied in pieces of kPiece.
template <typename F_, typename T_, int kM_>
struct Tile {
  using F = F_;
  using T = T_;
  static constexpr int kM = kM_, kTiles = kM / 8;
  static constexpr int kRows = kM == 64 || (kM == 32 && Piece<F>::kSlot > 144) ? 64 : 128;
  static constexpr int kWarps = kRows / 16, kThreads = 32 * kWarps;
  using X = typename Product<F, T>::X;
  // Rows of x are padded beyond a multiple of all banks. So the lanes that read at once are in different banks: a quarter
  // warp of 16 bytes each, half a warp of 8, or a warp of 4.
  static constexpr int kRowX = kPiece * sizeof(X) + (kIsInt4<F> ? 64 : 16 * sizeof(X));
  static constexpr int kCopiesX = kPiece * sizeof(X) / 16;
  static constexpr int kWeights = kRows * Piece<F>::kSlot, kStage = kWeights + kM * kRowX;
  static constexpr int kSumBytes = kSums<F> * kM * 4;
  static constexpr int kFit = (kMemory - kSumBytes) / kStage, kStages = kFit > 4 ? 4 : kFit;
  static constexpr int kBytes = kStages * kStage + kSumBytes;
  static_assert(kStages >= 2 && kBytes <= kMostShared);
};

struct Parts {
  int tiles_m, tiles_n, splits, pieces;
  float* sums;
  int stream;
};

// Sums the x of a piece, a sum for each row and group of kSummed. All threads of the block call it.
template <typename Tile>
__device__ void add_up_x(float* sums, const uint8_t* x) {
  using F = typename Tile::F;
  constexpr int kLanes = kSummed<F> / 8;  // that share a sum
  for (int i = threadIdx.x; i < Tile::kM * (kPiece / 8); i += Tile::kThreads) {
    const int row = i / (kPiece / 8), at = i % (kPiece / 8);
    float sum = sum_of<typename Tile::T>(*reinterpret_cast<const uint4*>(x + row * Tile::kRowX + at * 16));
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
    if (at % kLanes == 0) sums[at / kLanes * Tile::kM + row] = sum;
  }
}

// Writes this block's sums. In the block that arrives last, replaces them by the sums of all blocks and returns true; in the
// others returns false.
template <typename Tile>
__device__ bool add_up_parts(float (&sums)[Tile::kTiles][4], const Parts& parts, int tile, int split) {
  constexpr int kAll = Tile::kTiles * Tile::kThreads;
  float4* mine = reinterpret_cast<float4*>(parts.sums) + (int64_t(tile) * parts.splits + split) * kAll + threadIdx.x;
#pragma unroll
  for (int i = 0; i < Tile::kTiles; ++i)
    __stcg(mine + i * Tile::kThreads, float4{sums[i][0], sums[i][1], sums[i][2], sums[i][3]});
  __threadfence();
  __syncthreads();  // all threads have written before one reports it
  __shared__ bool last;
  if (threadIdx.x == 0)
    last = atomicInc(&arrivals[parts.stream][tile], parts.splits - 1) == unsigned(parts.splits) - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
#pragma unroll
  for (int i = 0; i < Tile::kTiles; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
  for (int s = 0; s < parts.splits; ++s)
#pragma unroll
    for (int i = 0; i < Tile::kTiles; ++i) {
      const float4 part = __ldcg(mine + (s - split) * kAll + i * Tile::kThreads);
      sums[i][0] += part.x, sums[i][1] += part.y, sums[i][2] += part.z, sums[i][3] += part.w;
    }
  return true;
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads) multiply(Product<typename Tile::F, typename Tile::T> p, Parts parts) {
  using F = typename Tile::F;
  using T = typename Tile::T;
  using X = typename Tile::X;
  extern __shared__ __align__(128) unsigned char shared[];
  float* x_sums = reinterpret_cast<float*>(shared + Tile::kStages * Tile::kStage);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
  const int tile = blockIdx.x / parts.splits, split = blockIdx.x % parts.splits;
  const int row0 = tile % parts.tiles_m * Tile::kM;  // neighbours read the same W
  const int64_t col0 = int64_t(tile / parts.tiles_m) * Tile::kRows + warp * 16;
  const int first = split * parts.pieces, end = min(first + parts.pieces, p.k / kPiece);

  const auto copy = [&](int piece) {
    uint8_t* stage = shared + (piece - first) % Tile::kStages * Tile::kStage;
    if (piece < end) {
      copy_pieces(stage + warp * 16 * Piece<F>::kSlot, p, col0, piece, lane);
#pragma unroll
      for (int i = threadIdx.x; i < Tile::kM * Tile::kCopiesX; i += Tile::kThreads) {
        const int row = i / Tile::kCopiesX, at = i % Tile::kCopiesX;
        const bool inside = row0 + row < p.m;
        cp_async_16(stage + Tile::kWeights + row * Tile::kRowX + at * 16,
                    p.x + int64_t(inside ? row0 + row : 0) * p.k + piece * kPiece + at * (16 / sizeof(X)), inside);
      }
    }
    cp_async_commit();  // an empty group too, so that the number of groups in flight is constant
  };

  float sums[Tile::kTiles][4] = {};
  for (int i = 0; i < Tile::kStages - 1; ++i) copy(first + i);
  for (int piece = first; piece < end; ++piece) {
    cp_async_wait<Tile::kStages - 2>();
    __syncthreads();  // the copies of all threads have arrived, and all are done with the stage that is filled next
    copy(piece + Tile::kStages - 1);
    const uint8_t* stage = shared + (piece - first) % Tile::kStages * Tile::kStage;
    const uint8_t* x = stage + Tile::kWeights;
    if constexpr (kSums<F> > 0) {
      add_up_x<Tile>(x_sums, x);
      __syncthreads();
    }
    const uint8_t* low = stage + (warp * 16 + lane / 4) * Piece<F>::kSlot + start_in_slot<F>(piece);
    multiply_piece<F, T>(
        sums, low, low + 8 * Piece<F>::kSlot,
        [&](int i, int block) {
          const uint8_t* row = x + (i * 8 + lane / 4) * Tile::kRowX;
          return ordered_x<F, T>(reinterpret_cast<const X*>(row) + block * 32, t);
        },
        [&](int i, int group) {
          return *reinterpret_cast<const float2*>(x_sums + group * Tile::kM + i * 8 + 2 * t);
        });
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
        if constexpr (std::is_same_v<F, Fp8Both>) sum *= p.x_scales[row];
        p.y[int64_t(row) * p.n + col] = T(sum);
      }
  }
}

template <int kM, typename F, typename T>
void launch_rows(const Product<F, T>& p) {
  using Of = Tile<F, T, kM>;
  const int all = p.k / kPiece;
  Parts parts{(p.m + kM - 1) / kM, (p.n + Of::kRows - 1) / Of::kRows, 1, all, nullptr, number_of(p.stream)};
  const int64_t tiles = int64_t(parts.tiles_m) * parts.tiles_n;
  allow_shared(multiply<Of>, Of::kBytes);
  int at_once = 0;
  STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, multiply<Of>, Of::kThreads, Of::kBytes));
  const int64_t wanted = tiles > kMostTiles ? 1 : int64_t(std::max(1, at_once)) * multiprocessors() / tiles;
  if (wanted > 1) {  // two pieces each at least
    parts.pieces = std::max<int>(2, (all + wanted - 1) / wanted);
    parts.splits = (all + parts.pieces - 1) / parts.pieces;
  }
  STD_TORCH_CHECK(tiles * parts.splits <= INT_MAX, "quant_gemm: y has more tiles than a launch has blocks");
  const auto sums = scratch(parts.splits > 1 ? tiles * parts.splits * kM * Of::kRows : 0);
  parts.sums = static_cast<float*>(sums.mutable_data_ptr());
  multiply<Of><<<dim3(tiles * parts.splits), Of::kThreads, Of::kBytes, p.stream>>>(p, parts);
}

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  require_pieces(p);
  if (p.m <= 16) return launch_rows<16>(p);
  if constexpr (Piece<F>::kSlot <= 144)  // with weights of 8 bits, two stages of 64 rows do not fit a block
    if (p.m > 32) return launch_rows<64>(p);
  launch_rows<32>(p);
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v03_mma, true, true, minfer::launch)
