// v07_stream: int4 and up to 16 rows of x. Each warp streams 16 rows of W from memory straight into registers.
// Idea: v02 copies W to shared memory and reads it again 4 bytes at a time, which takes 260 instructions for a piece of 16 x
// 256 weights. Its counters show neither memory nor the issue slots full: these instructions, and the waits between them, take
// longer than memory does. Any order of k serves that x has too. So each of the 4 lanes of a row takes 16 contiguous bytes of
// a group (8 with groups of 64): W takes one load and no shared memory, and a piece about 190 instructions. Each lane has four
// groups of two rows in flight; when a group is decoded, its registers are loaded again. A block puts x in the order of the
// fragments once, while the first loads are in flight. Its warps wait for each other then, and again at the end: each has 16
// rows of its own or, where rows are few, a slice of their k.
// Expected (int4, group 128): 20 us at 1 x 28672 x 4096 on an H200, 25 us at m = 16. Not measured yet.
#include "fragments.cuh"
#include "cuda/load_if.cuh"
#include "cuda/shared_tile.cuh"

namespace minfer {

constexpr int kUnit = 4;           // groups of a row that a lane has in registers; their scales are one load
constexpr int kMostWarps = 14;     // of an SM, with 144 registers a thread
constexpr int kRows = 16;          // of W for each warp
constexpr int kPerSM = 227 << 10;  // shared memory, of which a block uses 1 KB more than it asks for

// A group's share of a lane.
template <typename F>
using Share = std::conditional_t<F::kBlock == 128, uint4, uint2>;

// How a launch divides the work: `slices` warps of a block share the k of 16 rows.
struct Split {
  int warps, slices;
};

// A thread's place in the work. It is computed anew where it is needed again, because W needs the registers in between.
struct Place {
  int lane, warp, tile, slice;  // tile: which 16 rows of W

  __device__ explicit Place(Split split) {
    const int thread = kept(threadIdx.x), slices = kept(split.slices);
    lane = thread % 32, warp = thread / 32, slice = warp % slices;
    tile = kept(blockIdx.x) * (split.warps / slices) + warp / slices;
  }

  // The first of `units` that belong to the slice, and the one behind the last.
  __device__ int first(int units, Split split) const { return units * slice / split.slices; }
  __device__ int end(int units, Split split) const { return units * (slice + 1) / split.slices; }
};

template <typename F, typename T, int kTiles>
struct InShared {
  static constexpr int kColumns = 8 * kTiles;
  // Bytes of a row of x: 64 more than a multiple of 128, so that the two rows that a quarter warp reads are in different banks.
  __host__ __device__ static int row(int k) { return k * 2 + 64; }
  static int bytes(int m, int k, int warps) {
    const int x = m * row(k) + k / F::kBlock * kColumns * 4, sums = warps * kRows * kColumns * 4;
    return std::max(x, sums);
  }
};

// Copies x to shared memory, puts it in the order of the fragments there, and sums the x of each group. It holds no x in
// registers, which are full of W.
template <typename F, typename T, int kColumns>
__device__ inline void order_x(const Product<F, T>& p, uint8_t* shared, float* x_sums, int row_bytes) {
  using Pair = typename Vector<T>::Pair;
  constexpr int kEights = F::kBlock / 8, kWords = F::kBlock / 32;
  const int of_row = p.k / 8, all = p.m * of_row;  // a multiple of 32, so that all of a warp go on or none
  const auto place = [&](int i) { return shared + i / of_row * row_bytes + i % of_row * 16; };
  for (int i = threadIdx.x; i < all; i += blockDim.x) cp_async_16(place(i), p.x + int64_t(i) * 8);
  cp_async_commit();
  cp_async_wait<0>();
#pragma unroll 1
  for (int i = threadIdx.x; i < all; i += blockDim.x) {  // each lane takes what it has copied
    const int eight = i % kEights;
    uint8_t* mine = place(i);
    const uint4 x = *reinterpret_cast<const uint4*>(mine);
    __syncwarp();  // a lane must not overwrite what another has yet to read
    const int to = eight % kWords * 4 + eight / kWords;  // word of the lane * 4 + lane of the row
    *reinterpret_cast<uint4*>(mine + (to - eight) * 16) = in_order<F>({x.x, x.y}, {x.z, x.w});
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 pair = to_floats(reinterpret_cast<const Pair&>((&x.x)[w]));
      sum += pair.x + pair.y;
    }
#pragma unroll
    for (int mask = kEights / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
    if (eight == 0) x_sums[i % of_row / kEights * kColumns + i / of_row] = sum;
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
    for (int s = 0; s < split.slices; ++s) sum += of_tile[s * kTile + e];
    p.y[int64_t(e / kRows) * p.n + col] = T(sum);
  }
}

template <typename F, typename T, int kTiles>
__global__ void __maxnreg__(144) stream(Product<F, T> p, Split split) {
  using Of = InShared<F, T, kTiles>;
  using Words = Share<F>;
  constexpr int kWords = sizeof(Words) / 4, kGroup = F::kBlock / 2;  // bytes of a group
  constexpr int kChains = kTiles == 1 ? 2 : 1;                      // of products that wait for each other
  extern __shared__ __align__(128) unsigned char shared[];
  const int units = p.k / (kUnit * F::kBlock);
  const uint8_t *low, *high;  // the first group of this unit, of rows g and g + 8
  const T* mine;              // scales or zeros of the unit that was loaded last
  Words of_low[kUnit]{}, of_high[kUnit]{};
  uint2 next_factors{};
  {
    const Place place(split);
    const int t = place.lane % 4, row = place.tile * kRows + place.lane / 4, first = place.first(units, split);
    const bool any = first < place.end(units, split);
    // Rows beyond the last are the last again, and are not stored.
    const int64_t low_row = min(row, p.n - 1), high_row = min(row + 8, p.n - 1);
    const uint8_t* w = p.weights.w + int64_t(first) * kUnit * kGroup + t * sizeof(Words);
    low = w + low_row * (p.k / 2), high = w + high_row * (p.k / 2);
    // The scales of a unit's four groups are 8 bytes. The four lanes of a row load those of row g and of row g + 8, and zeros.
    mine = (t % 2 ? p.weights.zeros : p.weights.scales) + (t / 2 ? high_row : low_row) * (p.k / F::kBlock) + first * kUnit;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      load_if(of_low[i], low + i * kGroup, any);
      load_if(of_high[i], high + i * kGroup, any);
    }
    load_if(next_factors, mine, any);
  }

  const int row_bytes = Of::row(p.k);
  float* x_sums = reinterpret_cast<float*>(shared + p.m * row_bytes);
  order_x<F, T, Of::kColumns>(p, shared, x_sums, row_bytes);
  __syncthreads();

  const Place place(split);
  const int first = place.first(units, split), lane = place.lane, t = lane % 4, g = lane / 4;
  // Rows of x beyond the last are the last again: a product's columns are independent, and theirs are not stored.
  int x_at[kTiles], sum_at = kept(p.m * row_bytes + (first * kUnit * Of::kColumns + 2 * t) * 4);
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    x_at[i] = kept(min(8 * i + g, p.m - 1) * row_bytes + first * (kUnit * F::kBlock * 2) + t * 16);
  float sums[kTiles][4] = {};
  for (int left = place.end(units, split) - first; left > 0; --left) {
    const bool more = left > 1;
    const uint2 factors = next_factors;
    mine += kUnit;
    load_if(next_factors, mine, more);
    uint32_t pairs[4];  // of row g its scales and zeros, then of row g + 8, for two groups
#pragma unroll
    for (int group = 0; group < kUnit; ++group) {
      float parts[kTiles][kChains][4] = {};
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[0][i] = two_nibbles<F, T>((&of_low[group].x)[w] >> 4 * i, 8);
          a[1][i] = two_nibbles<F, T>((&of_high[group].x)[w] >> 4 * i, 8);
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const uint4 b = *reinterpret_cast<const uint4*>(shared + x_at[i] + group * (F::kBlock * 2) + w * 64);
          mma_m16n8k16<T>(parts[i][0], {a[0][0], a[1][0], a[0][1], a[1][1]}, {b.x, b.y});
          mma_m16n8k16<T>(parts[i][kChains - 1], {a[0][2], a[1][2], a[0][3], a[1][3]}, {b.z, b.w});
        }
      }
      load_if(of_low[group], low + (group + kUnit) * kGroup, more);
      load_if(of_high[group], high + (group + kUnit) * kGroup, more);
      __syncwarp();  // without it the compiler moves all products of the unit in front of these loads, and nothing hides them
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
    low += kUnit * kGroup, high += kUnit * kGroup, sum_at += kUnit * Of::kColumns * 4;
  }

  store<Of>(p, split, sums, reinterpret_cast<float*>(shared));
}

// Chooses the division that gives the busiest multiprocessor the least work; of equal ones, that with most resident warps.
template <typename F, typename T, int kTiles>
Split divide(const Product<F, T>& p) {
  const int tiles = (p.n + kRows - 1) / kRows, units = p.k / (kUnit * F::kBlock), sms = multiprocessors();
  Split best{1, 1};
  int64_t least = INT64_MAX;
  for (int slices = 1; slices <= std::min(kMostWarps, units); ++slices)
    for (int warps = slices; warps <= kMostWarps; warps += slices) {
      const int bytes = InShared<F, T, kTiles>::bytes(p.m, p.k, warps);
      const int at_once = std::min(kMostWarps / warps, std::max(1, kPerSM / (bytes + 1024)));
      const int64_t blocks = (tiles + warps / slices - 1) / (warps / slices), of_sm = (blocks + sms - 1) / sms;
      const int64_t work = of_sm * warps * ((units + slices - 1) / slices);
      const int64_t cost = work * (kMostWarps + 1) - std::min<int64_t>(of_sm, at_once) * warps;
      if (cost < least) least = cost, best = {warps, slices};
    }
  return best;
}

template <int kTiles, typename F, typename T>
void launch_tiles(const Product<F, T>& p) {
  const Split split = divide<F, T, kTiles>(p);
  const int of_block = split.warps / split.slices, bytes = InShared<F, T, kTiles>::bytes(p.m, p.k, split.warps);
  allow_shared(stream<F, T, kTiles>, bytes);
  const int blocks = ((p.n + kRows - 1) / kRows + of_block - 1) / of_block;
  stream<F, T, kTiles><<<dim3(blocks), 32 * split.warps, bytes, p.stream>>>(p, split);
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
