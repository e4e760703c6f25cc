// v07_stream: int4 and up to 16 rows of x. Each warp streams 16 rows of W through a ring that it alone uses, 16 bytes a lane.
// Idea: v02 copies W to shared memory and reads it again 4 bytes at a time: 260 instructions for 16 x 256 weights. But a sum
// over k may run in any order, if W and x have the same one. So each of a row's 4 lanes copies 16 contiguous bytes of a group
// (8 with groups of 64) by cp.async, reads its own bytes back, and waits for no other lane. Loads to registers would save
// the way through shared memory. But the compiler puts all of them on one scoreboard, so that a wait for the first load waits
// for the last one, too; a wait for a group of cp.async waits for the oldest only. A block reorders x once, into the order of
// the fragments, while the first copies are in flight. A warp has 16 rows of its own or, where rows are few, a slice of their
// k. The warps of a block wait for each other after x is reordered, and at the end.
// Expected (int4, group 128): 18 us at 1 x 28672 x 4096 on an H200, 22 us at m = 16.
// Measured (H200, bfloat16, int4_g128, float32, m=16, n=4096, k=4096): 35.78 TFLOP/s cold.
#include "fragments.cuh"
#include "cuda/load_if.cuh"
#include "cuda/shared_tile.cuh"

namespace minfer {

constexpr int kUnit = 4;           // groups of a row whose scales are one load
constexpr int kMostWarps = 14;     // of an SM: with 128 registers a thread 16 fit, and 28672 rows are 14 an SM
constexpr int kRows = 16;          // of W for each warp
constexpr int kAtOnce = 4;         // pieces of x that a lane puts in order at once
constexpr int kPerSM = 227 << 10;  // shared memory, of which a block uses 1 KB more than it asks for

// A group's share of a lane.
template <typename F>
using Share = std::conditional_t<F::kBlock == 128, uint4, uint2>;

// How a launch divides the work: a block has a row of threads for each of its tiles of 16 rows, whose k `slices` warps share.
struct Split {
  int warps, slices;
  int tiles, each, more;  // of a block; units of a slice, and how many slices have one more

  Split(int warps, int slices, int units)
      : warps(warps), slices(slices), tiles(warps / slices), each(units / slices), more(units % slices) {}
};

// A thread's place in the work. It is computed anew where it is needed again, so that it takes no registers in between.
struct Place {
  int lane, warp, tile, slice;  // tile: which 16 rows of W

  __device__ explicit Place(Split split) {
    const int thread = kept(threadIdx.x), own = kept(threadIdx.y);
    lane = thread % 32, slice = thread / 32, warp = own * kept(split.slices) + slice;
    tile = kept(blockIdx.x) * split.tiles + own;
  }

  // The first unit of the slice, and the one behind its last.
  __device__ int first(Split split) const { return slice * split.each + min(slice, split.more); }
  __device__ int end(Split split) const { return (slice + 1) * split.each + min(slice + 1, split.more); }
};

template <typename F, typename T, int kTiles>
struct InShared {
  static constexpr int kColumns = 8 * kTiles;
  // A warp's bytes of W: groups of 16 rows, as many as fit beside the x of 4096 x 8 or 16.
  static constexpr int kStages = kTiles == 1 ? 8 : 6, kStage = 32 * 2 * sizeof(Share<F>), kRing = kStages * kStage;
  // Bytes of a row of x: 64 more than a multiple of 128, so that the two rows that a quarter warp reads are in different banks.
  __host__ __device__ static int row(int k) { return k * 2 + 64; }
  static int bytes(int m, int k, int warps) {
    return std::max(x_bytes(m, k) + warps * kRing, warps * kRows * kColumns * 4);
  }
  __host__ __device__ static int x_bytes(int m, int k) {
    return (m * row(k) + k / F::kBlock * kColumns * 4 + 127) / 128 * 128;
  }
};

// The place of a thread's pieces of 16 bytes of x, as it goes through all of them: every blockDim.x-th.
struct PieceOfX {
  int row = 0, col, of_row, step;
  __device__ explicit PieceOfX(int of_row)
      : col(threadIdx.y * blockDim.x + threadIdx.x), of_row(of_row), step(blockDim.x * blockDim.y) {
    for (; col >= of_row; col -= of_row) ++row;
  }
  __device__ void next() {
    for (col += step; col >= of_row; col -= of_row) ++row;
  }
};

// Starts copying x to shared memory, as one group of cp.async.
template <typename F, typename T>
__device__ inline void copy_x(const Product<F, T>& p, uint8_t* shared, int row_bytes) {
  const int of_row = p.k / 8;
  for (PieceOfX piece(of_row); piece.row < p.m; piece.next())
    cp_async_16(shared + piece.row * row_bytes + piece.col * 16, p.x + int64_t(piece.row) * p.k + piece.col * 8);
  cp_async_commit();
}

// Puts x in the order of the fragments, where it is, and sums the x of each group. A lane takes what it has copied.
template <typename F, typename T, int kColumns>
__device__ inline void order_x(const Product<F, T>& p, uint8_t* shared, float* x_sums, int row_bytes) {
  constexpr int kEights = F::kBlock / 8, kWords = F::kBlock / 32;
  const int of_row = p.k / 8, lane = threadIdx.x % 32;  // a multiple of 32, so that all of a warp are in a row, or beyond all
  // Of a group, word of the lane * 4 + lane of the row is its new place.
  const int eight = lane % kEights, by = (eight % kWords * 4 + eight / kWords - eight) * 16;  //@ order
#pragma unroll 1
  for (PieceOfX piece(of_row); piece.row < p.m;) {
    uint4 x[kAtOnce];
    int at[kAtOnce], sums_at[kAtOnce], count = 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (piece.row >= p.m) break;
      at[j] = piece.row * row_bytes + piece.col * 16, sums_at[j] = (piece.col - lane) / kEights * kColumns + piece.row;
      x[j] = *reinterpret_cast<const uint4*>(shared + at[j]);
      piece.next(), ++count;
    }
    __syncwarp();  // a lane must not overwrite what another has yet to read
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (j >= count) break;
      *reinterpret_cast<uint4*>(shared + at[j] + by) = in_order<F>({x[j].x, x[j].y}, {x[j].z, x[j].w});
      add_up<F, T>(x_sums + sums_at[j], kColumns, x[j], lane);
    }
  }
}

// Adds the sums of a tile's slices in order, and stores them.
template <typename Of, typename F, typename T, int kTiles>
__device__ inline void store(const Product<F, T>& p, Split split, const float (&sums)[kTiles][4], float* all) {
  constexpr int kTile = kRows * Of::kColumns;
  const auto [lane, warp, tile, slice] = Place(split);
  __syncthreads();  // all are done with x
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      all[warp * kTile + (8 * i + lane % 4 * 2 + e % 2) * kRows + lane / 4 + e / 2 * 8] = sums[i][e];
  __syncthreads();
  const float* of_tile = all + (warp - slice) * kTile;
  for (int e = slice * 32 + lane; e < kRows * p.m; e += split.slices * 32) {
    const int col = tile * kRows + e % kRows;
    if (col >= p.n) continue;
    float sum = 0.0f;
    for (int s = 0; s < split.slices; ++s) sum += of_tile[s * kTile + e];  //@ slices
    p.y[int64_t(e / kRows) * p.n + col] = T(sum);
  }
}

__device__ inline void copy_words(void* shared, const void* global, uint4) { cp_async_16(shared, global); }
__device__ inline void copy_words(void* shared, const void* global, uint2) {
  cp_async_few<8>(shared, global);
}

template <typename F, typename T, int kTiles>
__global__ void __launch_bounds__(32 * kMostWarps, 1) stream(Product<F, T> p, Split split) {  //@ bounds
  using Of = InShared<F, T, kTiles>;
  using Words = Share<F>;
  constexpr int kWords = sizeof(Words) / 4, kGroup = F::kBlock / 2;  // bytes of a group
  constexpr int kChains = kTiles == 1 ? 2 : 1;                      // of products that wait for each other
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kStages = Of::kStages;
  const int row_bytes = Of::row(p.k);
  copy_x(p, shared, row_bytes);
  const uint8_t *low, *high;  // the next group to copy, of rows g and g + 8
  const T* mine;              // scales or zeros of the unit that was loaded last
  uint2 next_factors{};
  uint8_t* ring;  // where this lane's bytes of the warp's ring are
  int to_copy;    // groups of the slice that have not been started
  const auto start = [&](int stage) {
    if (to_copy > 0) {
      copy_words(ring + stage * Of::kStage, low, Words{});
      copy_words(ring + stage * Of::kStage + 32 * sizeof(Words), high, Words{});
    }
    cp_async_commit();
    --to_copy, low += kGroup, high += kGroup;
  };
  {
    const Place place(split);
    const int t = place.lane % 4, row = place.tile * kRows + place.lane / 4, first = place.first(split);
    to_copy = (place.end(split) - first) * kUnit;
    // Rows beyond the last are the last again, and are not stored.
    const int64_t low_row = min(row, p.n - 1), high_row = min(row + 8, p.n - 1);
    const uint8_t* w = p.weights.w + int64_t(first) * kUnit * kGroup + t * sizeof(Words);
    low = w + low_row * (p.k / 2), high = w + high_row * (p.k / 2);
    ring = shared + Of::x_bytes(p.m, p.k) + place.warp * Of::kRing + place.lane * sizeof(Words);
    // The scales of a unit's four groups are 8 bytes. The four lanes of a row load those of row g and of row g + 8, and zeros.
    //@ row_of_lane
    mine = (t % 2 ? p.weights.zeros : p.weights.scales) + (t / 2 ? high_row : low_row) * (p.k / F::kBlock) + first * kUnit;
    load_if(next_factors, mine, to_copy > 0);
#pragma unroll
    for (int i = 0; i < kStages; ++i) start(i);
  }

  float* x_sums = reinterpret_cast<float*>(shared + p.m * row_bytes);
  cp_async_wait<kStages>();  // for x
  order_x<F, T, Of::kColumns>(p, shared, x_sums, row_bytes);
  __syncthreads();  //@ ordered

  const Place place(split);
  const int first = place.first(split), lane = place.lane, t = lane % 4, g = lane / 4;
  // Rows of x beyond the last are the last again: a product's columns are independent, and theirs are not stored.
  int x_at[kTiles], sum_at = kept(p.m * row_bytes + (first * kUnit * Of::kColumns + 2 * t) * 4);
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    x_at[i] = kept(min(8 * i + g, p.m - 1) * row_bytes + first * (kUnit * F::kBlock * 2) + t * 16);
  float sums[kTiles][4] = {};
  int stage = 0;
  for (int left = place.end(split) - first; left > 0; --left) {
    const bool more = left > 1;
    const uint2 factors = next_factors;
    mine += kUnit;
    load_if(next_factors, mine, more);
    uint32_t pairs[4];  // of row g its scales and zeros, then of row g + 8, for two groups
#pragma unroll
    for (int group = 0; group < kUnit; ++group) {
      float parts[kTiles][kChains][4] = {};
      cp_async_wait<kStages - 1>();  //@ arrived
      const Words of_low = *reinterpret_cast<const Words*>(ring + stage * Of::kStage);
      const Words of_high = *reinterpret_cast<const Words*>(ring + stage * Of::kStage + 32 * sizeof(Words));
      start(stage);  // this lane alone reads what it has copied
      if (++stage == kStages) stage = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[0][i] = two_nibbles<F, T>((&of_low.x)[w] >> 4 * i, 8);
          a[1][i] = two_nibbles<F, T>((&of_high.x)[w] >> 4 * i, 8);
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const uint4 b = *reinterpret_cast<const uint4*>(shared + x_at[i] + group * (F::kBlock * 2) + w * 64);
          mma_m16n8k16<T>(parts[i][0], {a[0][0], a[1][0], a[0][1], a[1][1]}, {b.x, b.y});
          mma_m16n8k16<T>(parts[i][kChains - 1], {a[0][2], a[1][2], a[0][3], a[1][3]}, {b.z, b.w});
        }
      }
      if (group % 2 == 0)
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = __shfl_sync(0xffffffff, (&factors.x)[group / 2], lane / 4 * 4 + i);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const auto element = [&](uint32_t pair) {
          const unsigned short bits = static_cast<unsigned short>(pair >> group % 2 * 16);
          return float(reinterpret_cast<const T&>(bits));
        };
        const float scale = element(pairs[2 * row]), zero = element(pairs[2 * row + 1]);
        const float least = scale * ((kKeepsBase<F, T> ? -128.0f : 8.0f) - zero);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const float2 total = *reinterpret_cast<const float2*>(shared + sum_at + (group * Of::kColumns + 8 * i) * 4);
#pragma unroll
          for (int e = 2 * row; e < 2 * row + 2; ++e) {
            const float part = kChains == 1 ? parts[i][0][e] : parts[i][0][e] + parts[i][1][e];
            sums[i][e] += scale * part + least * (e % 2 ? total.y : total.x);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) x_at[i] += kUnit * F::kBlock * 2;
    sum_at += kUnit * Of::kColumns * 4;
  }

  store<Of>(p, split, sums, reinterpret_cast<float*>(shared));
}

// Chooses the division that gives the busiest multiprocessor the least work; of equal ones, that with most resident
// warps, and then that with the larger blocks.
template <typename F, typename T, int kTiles>
Split divide(const Product<F, T>& p) {
  const int tiles = (p.n + kRows - 1) / kRows, units = p.k / (kUnit * F::kBlock), sms = multiprocessors();
  Split best(1, 1, units);
  int64_t least = INT64_MAX;
  for (int slices = 1; slices <= std::min(kMostWarps, units); ++slices)
    for (int warps = slices; warps <= kMostWarps; warps += slices) {
      const int bytes = InShared<F, T, kTiles>::bytes(p.m, p.k, warps);
      if (bytes > kMostShared) continue;
      const int at_once = std::min(kMostWarps / warps, std::max(1, kPerSM / (bytes + 1024)));
      const int64_t blocks = (tiles + warps / slices - 1) / (warps / slices), of_sm = (blocks + sms - 1) / sms;
      const int64_t work = of_sm * warps * ((units + slices - 1) / slices);
      const int64_t cost = work * (kMostWarps + 1) - std::min<int64_t>(of_sm, at_once) * warps;
      if (cost < least || (cost == least && slices == best.slices)) least = cost, best = Split(warps, slices, units);
    }
  return best;
}

template <int kTiles, typename F, typename T>
void launch_tiles(const Product<F, T>& p) {
  const Split split = divide<F, T, kTiles>(p);
  const dim3 threads(32 * split.slices, split.tiles);
  const int bytes = InShared<F, T, kTiles>::bytes(p.m, p.k, split.warps);
  allow_shared(stream<F, T, kTiles>, bytes);
  const int blocks = ((p.n + kRows - 1) / kRows + split.tiles - 1) / split.tiles;
  stream<F, T, kTiles><<<dim3(blocks), threads, bytes, p.stream>>>(p, split);
}

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  if constexpr (kIsInt4<F>) {
    STD_TORCH_CHECK(p.m <= 16, "quant_gemm: x must have at most 16 rows for this kernel, got ", p.m);
    STD_TORCH_CHECK(p.k % (kUnit * F::kBlock) == 0, "quant_gemm: w must have rows of a multiple of ", kUnit * F::kBlock,
                    " weights for this kernel, got ", p.k);
    check_pieces(p.weights.w, p.k / 2, p.k / 2, "quant_gemm: w");
    check_pieces(p.x, p.k, p.k, "quant_gemm: x");
    check_pieces(p.weights.scales, kUnit, kUnit, "quant_gemm: scales", 8);
    check_pieces(p.weights.zeros, kUnit, kUnit, "quant_gemm: zeros", 8);
    // As many rows of x at once as fit in a block: on Hopper all that `fits_stream` lets through, on an L40S perhaps fewer.
    const auto fits = [&](int m) {
      return (m <= 8 ? InShared<F, T, 1>::bytes(m, p.k, 1) : InShared<F, T, 2>::bytes(m, p.k, 1)) <= kMostShared;
    };
    int fit = p.m;
    while (fit > 0 && !fits(fit)) --fit;
    STD_TORCH_CHECK(fit > 0, "quant_gemm: x must have rows that fit in the ", kMostShared, " bytes of a block, got ", p.k,
                    " elements");
    for (int row = 0; row < p.m; row += fit) {
      Product<F, T> some = p;
      some.m = std::min(fit, p.m - row), some.x = p.x + int64_t(row) * p.k, some.y = p.y + int64_t(row) * p.n;
      if (some.m <= 8) launch_tiles<1>(some);
      else launch_tiles<2>(some);
    }
  } else {
    STD_TORCH_CHECK(false, "quant_gemm: w must be int4 for this kernel");
  }
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v07_stream, true, false, minfer::launch)
