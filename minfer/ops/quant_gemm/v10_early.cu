// v10_early: v07_stream for int4 in groups of 128, with launches that begin while the previous one still runs.
// Idea: as in hgemm's v19_early. Blocks start as soon as those of the previous launch have all started (programmatic dependent
// launch) and SMs have room for them. Before the previous launch has ended they read nothing, or only W with its scales and
// zeros, if the caller says that these are constant (`quant_gemm_v10_early_constant`). So the rings are full of W when x is
// ready. A warp orders x in registers, and writes it to shared memory once. In `quant_gemm_v10_early_swiglu` a warp has 8 rows
// of the gate and the 8 rows that these are multiplied with, so SwiGLU takes no launch of its own.
// Expected (H100, in a step of Llama 3.1 8B at batch 1): 2 us less than v07 for each product.
#include "cuda/dependent.cuh"
#include "cuda/load_if.cuh"
#include "cuda/shared_tile.cuh"
#include "fragments.cuh"

namespace minfer {

using G128 = Int4<128>;
constexpr int kUnit = 4, kGroup = 128;  // groups of a row whose scales are one load; weights of a group
constexpr int kMostWarps = 14;          // of an SM: at 128 registers a thread 16 fit; 28672 rows of W make 14 for each SM
constexpr int kRows = 16, kHalf = 8;    // of W for each warp, in two halves
constexpr int kAtOnce = 4;              // pieces of x that a lane puts in order at once
constexpr int kPerSM = 227 << 10;       // shared memory, of which a block uses 1 KB more than it asks for

// How a launch divides the work: a block has `tiles` tiles of 16 rows, whose k `slices` warps share.
struct Split {
  int warps, slices;
  int tiles, each, more;  // of a block; units of a slice, and how many slices have one more

  Split(int warps, int slices, int units)
      : warps(warps), slices(slices), tiles(warps / slices), each(units / slices), more(units % slices) {}
};

struct Options {
  bool gated;     // y (m, n / 2) is SwiGLU: the gate has the first half of the rows of W
  bool constant;  // no launch that may still run writes W
};

// A thread's place in the work. It is computed anew where it is needed again, so that it takes no registers in between.
struct Place {
  int lane, warp, tile, slice;  // tile: which 16 rows of W

  __device__ explicit Place(Split split) {
    const int thread = kept(threadIdx.x);
    lane = thread % 32, warp = thread / 32;
    const int own = warp / kept(split.slices);
    slice = warp - own * split.slices, tile = kept(blockIdx.x) * split.tiles + own;
  }

  // The first unit of the slice, and the one behind its last.
  __device__ int first(Split split) const { return slice * split.each + min(slice, split.more); }
  __device__ int end(Split split) const { return (slice + 1) * split.each + min(slice + 1, split.more); }
};

template <int kTiles>
struct InShared {
  static constexpr int kColumns = 8 * kTiles;
  // A warp's ring of W: a stage is a group of 16 rows, and as many fit beside 8 or 16 rows of x of 4096.
  static constexpr int kStages = kTiles == 1 ? 8 : 6, kStage = 32 * 2 * sizeof(uint4), kRing = kStages * kStage;
  // Bytes of a row of x: 64 more than a multiple of 128, so that the two rows that a quarter warp reads are in different banks.
  __host__ __device__ static int row(int k) { return k * 2 + 64; }
  static int bytes(int m, int k, int warps) {
    return std::max(x_bytes(m, k) + warps * kRing, warps * kRows * kColumns * 4);
  }
  __host__ __device__ static int x_bytes(int m, int k) { return (m * row(k) + k / kGroup * kColumns * 4 + 127) / 128 * 128; }
};

// Puts x in the order of the fragments in shared memory, and sums the x of each group.
template <typename T, int kColumns>
__device__ inline void order_x(const Product<G128, T>& p, uint8_t* shared, float* x_sums, int row_bytes) {
  const int of_row = p.k / 8, all = p.m * of_row, lane = threadIdx.x % 32;  // pieces of 16 bytes: all of a warp are in a row
  // Piece 4 * t + w of a group comes to place 4 * w + t: lane t of a row reads it with its word w of W.
  const int piece = lane % 16, by = piece % 4 * 4 + piece / 4 - piece;  //@ order
#pragma unroll 1
  for (int first = threadIdx.x; first < all; first += kAtOnce * blockDim.x) {
    uint4 x[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (const int i = first + j * blockDim.x; i < all) x[j] = reinterpret_cast<const uint4*>(p.x)[i];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * blockDim.x;
      if (i >= all) break;
      const int row = i / of_row, at = i - row * of_row;
      const uint4 ordered = in_order<G128>({x[j].x, x[j].y}, {x[j].z, x[j].w});
      *reinterpret_cast<uint4*>(shared + row * row_bytes + (at + by) * 16) = ordered;
      add_up<G128, T>(x_sums + (at - lane) / 16 * kColumns + row, kColumns, ordered, lane);
    }
  }
}

// Adds the sums of a tile's slices in order, and stores them.
template <typename T, int kTiles>
__device__ inline void store(const Product<G128, T>& p, Split split, bool gated, const float (&sums)[kTiles][4], float* all) {
  constexpr int kTile = kRows * 8 * kTiles;
  const auto [lane, warp, tile, slice] = Place(split);
  __syncthreads();  // all are done with x
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      all[warp * kTile + (8 * i + lane % 4 * 2 + e % 2) * kRows + lane / 4 + e / 2 * kHalf] = sums[i][e];
  __syncthreads();
  const float* of_tile = all + (warp - slice) * kTile;
  const auto total = [&](int e) {
    float sum = 0.0f;
    for (int s = 0; s < split.slices; ++s) sum += of_tile[s * kTile + e];  //@ slices
    return sum;
  };
  const int rows = gated ? kHalf : kRows, columns = gated ? p.n / 2 : p.n;
  for (int e = slice * 32 + lane; e < rows * p.m; e += split.slices * 32) {
    const int col = tile * rows + e % rows, from = e / rows * kRows + e % rows;
    if (col >= columns) continue;
    float sum = total(from);
    if (gated) sum = sum / (1.0f + __expf(-sum)) * total(from + kHalf);  //@ gate
    p.y[int64_t(e / rows) * columns + col] = T(sum);
  }
}

template <typename T, int kTiles>
__global__ void __launch_bounds__(32 * kMostWarps, 1) stream_early(Product<G128, T> p, Split split, Options how) {  //@ bounds
  using Of = InShared<kTiles>;
  constexpr int kStages = Of::kStages, kGroupBytes = kGroup / 2;
  constexpr int kChains = kTiles == 1 ? 2 : 1;  // of products that wait for each other
  extern __shared__ __align__(128) unsigned char shared[];
  const int row_bytes = Of::row(p.k);
  let_next_start();
  if (!how.constant) wait_for_previous();
  const uint8_t *low, *high;  // the next group to copy, of rows g of both halves
  const T* mine;              // scales or zeros of the unit that was loaded last
  uint2 next_factors{};
  bool loads;     // whether this lane has scales or zeros to load
  uint8_t* ring;  // where this lane's bytes of the warp's ring are
  int to_copy;    // groups of the slice that have not been started
  const auto start = [&](int stage) {
    if (to_copy > 0) {
      cp_async_16(ring + stage * Of::kStage, low);
      cp_async_16(ring + stage * Of::kStage + 32 * sizeof(uint4), high);
    }
    cp_async_commit();
    --to_copy, low += kGroupBytes, high += kGroupBytes;
  };
  {
    const Place place(split);
    const int t = place.lane % 4, row = place.tile * (how.gated ? kHalf : kRows) + place.lane / 4;
    const int first = place.first(split);
    to_copy = (place.end(split) - first) * kUnit;
    // Rows beyond the last are the last again, and are not stored.
    const int64_t low_row = min(row, p.n - 1), high_row = min(row + (how.gated ? p.n / 2 : kHalf), p.n - 1);  //@ half
    const uint8_t* w = p.weights.w + int64_t(first) * kUnit * kGroupBytes + t * sizeof(uint4);
    low = w + low_row * (p.k / 2), high = w + high_row * (p.k / 2);
    ring = shared + Of::x_bytes(p.m, p.k) + place.warp * Of::kRing + place.lane * sizeof(uint4);
    // The scales of a unit's four groups are 8 bytes. The four lanes of a row load those of row g and of row g + 8, and zeros.
    //@ row_of_lane
    mine = (t % 2 ? p.weights.zeros : p.weights.scales) + (t / 2 ? high_row : low_row) * (p.k / kGroup) + first * kUnit;
    loads = t % 2 == 0 || p.weights.zeros;
    if (!loads) {
      constexpr uint32_t kEights = std::is_same_v<T, __half> ? 0x48004800u : 0x41004100u;  // zeros of 8
      next_factors = {kEights, kEights};
    }
    load_if(next_factors, mine, loads && to_copy > 0);
#pragma unroll
    for (int i = 0; i < kStages; ++i) start(i);
  }

  float* x_sums = reinterpret_cast<float*>(shared + p.m * row_bytes);
  wait_for_previous();
  order_x<T, Of::kColumns>(p, shared, x_sums, row_bytes);
  __syncthreads();  //@ ordered

  const Place place(split);
  const int first = place.first(split), lane = place.lane, t = lane % 4, g = lane / 4;
  // Rows of x beyond the last are the last again: a product's columns are independent, and theirs are not stored.
  int x_at[kTiles], sum_at = kept(p.m * row_bytes + (first * kUnit * Of::kColumns + 2 * t) * 4);
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    x_at[i] = kept(min(8 * i + g, p.m - 1) * row_bytes + first * (kUnit * kGroup * 2) + t * 16);
  float sums[kTiles][4] = {};
  int stage = 0;
  for (int left = place.end(split) - first; left > 0; --left) {
    const bool more = left > 1;
    const uint2 factors = next_factors;
    mine += kUnit;
    load_if(next_factors, mine, loads && more);
    uint32_t pairs[4];  // of row g its scales and zeros, then of row g + 8, for two groups
#pragma unroll
    for (int group = 0; group < kUnit; ++group) {
      float parts[kTiles][kChains][4] = {};
      cp_async_wait<kStages - 1>();  //@ arrived
      const uint4 of_low = *reinterpret_cast<const uint4*>(ring + stage * Of::kStage);
      const uint4 of_high = *reinterpret_cast<const uint4*>(ring + stage * Of::kStage + 32 * sizeof(uint4));
      start(stage);  // this lane alone reads what it has copied
      if (++stage == kStages) stage = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[0][i] = two_nibbles<G128, T>((&of_low.x)[w] >> 4 * i, 8);
          a[1][i] = two_nibbles<G128, T>((&of_high.x)[w] >> 4 * i, 8);
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const uint4 b = *reinterpret_cast<const uint4*>(shared + x_at[i] + group * (kGroup * 2) + w * 64);
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
        const float least = scale * ((kKeepsBase<G128, T> ? -128.0f : 8.0f) - zero);
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
    for (int i = 0; i < kTiles; ++i) x_at[i] += kUnit * kGroup * 2;
    sum_at += kUnit * Of::kColumns * 4;
  }

  store(p, split, how.gated, sums, reinterpret_cast<float*>(shared));
}

// Chooses the division that gives the busiest multiprocessor the least work; of equal ones, that with most resident
// warps, and then that with the larger blocks.
template <int kTiles>
Split divide(int m, int k, int tiles) {
  const int units = k / (kUnit * kGroup), sms = multiprocessors();
  Split best(1, 1, units);
  int64_t least = INT64_MAX;
  for (int slices = 1; slices <= std::min(kMostWarps, units); ++slices)
    for (int warps = slices; warps <= kMostWarps; warps += slices) {
      const int bytes = InShared<kTiles>::bytes(m, k, warps);
      if (bytes > kMostShared) continue;
      const int at_once = std::min(kMostWarps / warps, std::max(1, kPerSM / (bytes + 1024)));
      const int64_t blocks = (tiles + warps / slices - 1) / (warps / slices), of_sm = (blocks + sms - 1) / sms;
      const int64_t work = of_sm * warps * ((units + slices - 1) / slices);
      const int64_t cost = work * (kMostWarps + 1) - std::min<int64_t>(of_sm, at_once) * warps;
      if (cost < least || (cost == least && slices == best.slices)) least = cost, best = Split(warps, slices, units);
    }
  return best;
}

template <int kTiles, typename T>
void launch_tiles(const Product<G128, T>& p, Options how) {
  const int rows = how.gated ? kHalf : kRows, all = how.gated ? p.n / 2 : p.n, tiles = (all + rows - 1) / rows;
  const Split split = divide<kTiles>(p.m, p.k, tiles);
  const int bytes = InShared<kTiles>::bytes(p.m, p.k, split.warps), blocks = (tiles + split.tiles - 1) / split.tiles;
  STD_TORCH_CHECK(bytes <= kMostShared, "quant_gemm: x must have rows that fit in the ", kMostShared,
                  " bytes of a block, got ", p.m, " rows of ", p.k);
  allow_shared(stream_early<T, kTiles>, bytes);
  STD_CUDA_CHECK(launch_early(stream_early<T, kTiles>, 1, dim3(blocks), 32 * split.warps, bytes, p.stream, p, split, how));
}

template <typename T>
void launch_with(const Product<G128, T>& p, Options how) {
  STD_TORCH_CHECK(p.m <= 16, "quant_gemm: x must have at most 16 rows for this kernel, got ", p.m);
  STD_TORCH_CHECK(p.k % (kUnit * kGroup) == 0, "quant_gemm: w must have rows of a multiple of ", kUnit * kGroup,
                  " weights for this kernel, got ", p.k);
  STD_TORCH_CHECK(!how.gated || p.n % 2 == 0, "quant_gemm: w must have an even number of rows, got ", p.n);
  check_pieces(p.weights.w, p.k / 2, p.k / 2, "quant_gemm: w");
  check_pieces(p.x, p.k, p.k, "quant_gemm: x");
  check_pieces(p.weights.scales, kUnit, kUnit, "quant_gemm: scales", 8);
  if (p.weights.zeros) check_pieces(p.weights.zeros, kUnit, kUnit, "quant_gemm: zeros", 8);
  p.m <= 8 ? launch_tiles<1>(p, how) : launch_tiles<2>(p, how);
}

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  if constexpr (std::is_same_v<F, G128>) launch_with(p, {false, false});
  else STD_TORCH_CHECK(false, "quant_gemm: w must be int4 in groups of 128 for this kernel");
}

// For w, scales and zeros that no launch writes which may still run. If `zeros` is empty, all are 8.
void launch_constant(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& scales, const Tensor& zeros, bool gated) {
  dispatch<Half, BFloat16>(y.scalar_type(), "quant_gemm: y", [&]<typename T>() {
    Product<G128, T> p;
    const bool given = zeros.numel() > 0;
    p.weights = make_weights<G128, T>(w, scales, given ? zeros : scales, "quant_gemm");
    if (!given) p.weights.zeros = nullptr;
    check_rank(x, "quant_gemm: x", 2);
    p.m = to_int(x.size(0), "quant_gemm: x"), p.n = to_int(p.weights.n, "quant_gemm: w"), p.k = p.weights.k;
    check_sizes(x, "quant_gemm: x", {p.m, p.k});
    check_sizes(y, "quant_gemm: y", {p.m, gated ? p.n / 2 : p.n});
    check_contiguous(x, "quant_gemm: x");
    check_contiguous(y, "quant_gemm: y");
    p.y = output<T>(y, "quant_gemm: y"), p.x = input<T>(x, "quant_gemm: x"), p.x_scales = nullptr, p.stream = stream_of(y);
    if (y.numel() > 0) launch_with(p, {gated, true});
  });
  check_launch();
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v10_early, true, false, minfer::launch)

static void quant_gemm_v10_early_constant(minfer::Tensor y, const minfer::Tensor x, const minfer::Tensor w,
                                          const minfer::Tensor scales, const minfer::Tensor zeros) {
  minfer::launch_constant(y, x, w, scales, zeros, false);
}
MINFER_OP(quant_gemm_v10_early_constant, "(Tensor(a!) y, Tensor x, Tensor w, Tensor scales, Tensor zeros) -> ()")

static void quant_gemm_v10_early_swiglu(minfer::Tensor y, const minfer::Tensor x, const minfer::Tensor w,
                                        const minfer::Tensor scales, const minfer::Tensor zeros) {
  minfer::launch_constant(y, x, w, scales, zeros, true);
}
MINFER_OP(quant_gemm_v10_early_swiglu, "(Tensor(a!) y, Tensor x, Tensor w, Tensor scales, Tensor zeros) -> ()")
