// v10_early: int4 in groups of 128, up to 32 rows of x; its launch begins while the previous one still runs.
// Idea: the products of a decoder's step follow short kernels, which leave memory idle (see hgemm's v19_early). So one warp of
// a block starts filling a ring with W as soon as the block has started, if the caller says that W is constant
// (`quant_gemm_v10_early_constant`), and only the other 16 warps wait for the previous launch. Bulk copies bring 1 KB of each
// of 16 rows to a stage, which reads memory in longer pieces than v07's copies of 64 bytes, and takes no instructions of the
// warps that multiply. Each of these has one group of 128 in a stage, always of the same columns of W. So the part of x that a
// warp needs stays in its registers, in the order of the fragments, and shared memory is read for W only. If k is too long for
// this, the blocks of a cluster share k, and add their sums at the end. In `quant_gemm_v10_early_swiglu` the tensor-core rows
// of a tile are 8 rows of the gate and the same 8 rows of what it multiplies. So one thread has both sums.
// Expected (H100, group 128, m = 1): 23 us at 28672 x 4096, 12 us at 4096 x 14336, and 2 us less within a step.
#include "cuda/cluster.cuh"
#include "cuda/dependent.cuh"
#include "cuda/named_barrier.cuh"
#include "cuda/shared_tile.cuh"
#include "fragments.cuh"

namespace minfer {

using G128 = Int4<128>;
constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kRows = 16, kHalf = 8;                           // of W in a tile, which has two halves
constexpr int kGroupBytes = 64, kRow = kWarps * kGroupBytes;   // of a row of W in a stage
constexpr int kRowSlot = kRow + 64;                            // so that two rows that a quarter warp reads are in different banks
constexpr int kWeights = kRows * kRowSlot;                     // bytes of a stage
constexpr int kMostStages = 16, kBarriers = 2 * kMostStages * int(sizeof(uint64_t));
constexpr int kMostRanks = 8, kMostM = 32, kShared = 227 << 10, kMostOfRanks = 64 << 10;

// The sums of a warp, by column: 10 and not 8 apart, so that the stores of a quarter warp are in different banks.
constexpr int kColumnSlot = 10;
template <int kTiles>
constexpr int kWarpSlot = 8 * kTiles * kColumnSlot + 2;

// How a launch divides the work. A cluster has `tiles` tiles of 16 rows of W, and each of its `ranks` blocks `groups` of their
// groups. `bytes` of a stage: W, and in a tile's first one its scales, and its zeros if there are any.
struct Division {
  int ranks, tiles, groups, stages, bytes;
  bool gated, constant;
};

template <typename T>
struct Work {
  Product<G128, T> p;
  Division by;
  int all_groups, all_tiles;
  int high_row;  // of W, where the second half of the first tile begins

  // The first rows of W of the halves of a tile.
  __device__ int row(int tile, int half) const { return tile * (by.gated ? kHalf : kRows) + half * high_row; }
  // Whether the second half is there: n is a multiple of 8.
  __device__ bool is_whole(int tile) const { return row(tile, 1) < p.n; }
};

// Where the blocks of a cluster send their sums of a tile: all to one, in turn.
template <typename T>
__device__ inline int place_of_sums(const Work<T>& work, int rank, int tile) {
  const int owned = (work.by.tiles + work.by.ranks - 1) / work.by.ranks;
  return (rank * owned + tile / work.by.ranks) * kHalf * work.p.m;
}

// Stores the sums of a row in each half of a tile.
template <typename T>
__device__ inline void store(const Work<T>& work, int tile, int row, int column, float2 sums) {
  if (work.by.gated) {
    const float silu = sums.x / (1.0f + __expf(-sums.x));
    work.p.y[int64_t(column) * (work.p.n / 2) + work.row(tile, 0) + row] = T(silu * sums.y);  //@ gate
  } else {
    T* y = work.p.y + int64_t(column) * work.p.n + row;
    y[work.row(tile, 0)] = T(sums.x);
    if (work.is_whole(tile)) y[work.row(tile, 1)] = T(sums.y);  //@ second_half
  }
}

// A warp fills a stage with the block's part of a tile: with the i-th of all that the block multiplies.
template <typename T>
__device__ inline void fill_stage(const Work<T>& work, uint8_t* stages, uint64_t* full, int tile, int first, int groups, int step,
                                  int stage) {
  const auto& weights = work.p.weights;
  const int lane = threadIdx.x % 32, octet = kHalf * work.all_groups * int(sizeof(T));  // bytes of the scales of a half
  const int half = lane < kRows ? lane / kHalf : lane % 2, halves = work.is_whole(tile) ? 2 : 1;
  const int bytes = min(kWarps, groups - step * kWarps) * kGroupBytes;
  const int scales = step > 0 ? 0 : weights.zeros ? 2 : 1;
  uint8_t* at = stages + stage * work.by.bytes;
  if (lane == 0) barrier_expect(full + stage, halves * (kHalf * bytes + scales * octet));
  __syncwarp();
  const int64_t row = work.row(tile, half);
  if (lane < kRows) {
    const uint8_t* w = weights.w + (row + lane % kHalf) * (work.p.k / 2) + (first + step * kWarps) * kGroupBytes;
    if (half < halves) bulk_load(at + lane * kRowSlot, w, bytes, full + stage);
  } else if (lane < kRows + 2 * scales && half < halves) {
    const T* of_half = (lane < kRows + 2 ? weights.scales : weights.zeros) + row * work.all_groups;
    bulk_load(at + kWeights + (lane - kRows) * octet, of_half, octet, full + stage);
  }
}

// The part of x of a lane, in the order of the fragments: of kSteps groups for each of kTiles times 8 rows of x.
template <typename T, int kTiles, int kSteps>
struct PartOfX {
  uint4 words[kSteps][kTiles][4];
  float2 sums[kSteps][kTiles];  // of all x of the group, for rows 2 t and 2 t + 1 of x

  __device__ PartOfX(const Product<G128, T>& p, int first, int groups, int warp, int lane) {
    constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int row = 8 * tile + lane / 4, group = s * kWarps + warp;
        const bool there = row < p.m && group < groups;  //@ row_of_x
        const T* from = p.x + int64_t(there ? row : 0) * p.k + (there ? first + group : 0) * 128 + lane % 4 * 32;
#pragma unroll
        for (int w = 0; w < 4; ++w) words[s][tile][w] = there ? reinterpret_cast<const uint4*>(from)[w] : uint4{};
      }
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float found[4] = {};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          uint4& x = words[s][tile][w];
          x = in_order<G128>({x.x, x.y}, {x.z, x.w});
          mma_m16n8k16<T>(found, {kOnes, kOnes, kOnes, kOnes}, {x.x, x.y});
          mma_m16n8k16<T>(found, {kOnes, kOnes, kOnes, kOnes}, {x.z, x.w});
        }
        sums[s][tile] = {found[0], found[1]};
      }
  }
};

// Adds to `sums` the products of a group of 16 rows of W, of which this lane has 32 weights of a row at `low` and 32 at `high`.
template <typename T, int kTiles>
__device__ inline void multiply_group(float (&sums)[kTiles][4], const uint8_t* low, const uint8_t* high, const uint4 (&x)[kTiles][4],
                                      const float2 (&x_sums)[kTiles], const float (&scale)[2], const float (&zero)[2]) {
  constexpr int kChains = kTiles == 1 ? 2 : 1;  // of products that wait for each other
  constexpr int kAtOnce = kTiles == 4 ? 2 : 4;  // words: with 32 rows of x there are no registers for all
  using Words = std::conditional_t<kAtOnce == 2, uint2, uint4>;
  float parts[kTiles][kChains][4] = {};
  Words of_low, of_high;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (w % kAtOnce == 0) {
      of_low = reinterpret_cast<const Words*>(low)[w / kAtOnce];
      of_high = reinterpret_cast<const Words*>(high)[w / kAtOnce];
    }
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[0][i] = two_nibbles<G128, T>((&of_low.x)[w % kAtOnce] >> 4 * i, 8);
      a[1][i] = two_nibbles<G128, T>((&of_high.x)[w % kAtOnce] >> 4 * i, 8);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4& b = x[tile][w];
      mma_m16n8k16<T>(parts[tile][0], {a[0][0], a[1][0], a[0][1], a[1][1]}, {b.x, b.y});
      mma_m16n8k16<T>(parts[tile][kChains - 1], {a[0][2], a[1][2], a[0][3], a[1][3]}, {b.z, b.w});
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float least = scale[half] * ((kKeepsBase<G128, T> ? -128.0f : 8.0f) - zero[half]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        const float part = kChains == 1 ? parts[tile][0][e] : parts[tile][0][e] + parts[tile][kChains - 1][e];
        sums[tile][e] += scale[half] * part + least * (e % 2 ? x_sums[tile].y : x_sums[tile].x);
      }
  }
}

// The bounds of 640 threads keep registers free for the blocks of the launches before and after this one.
template <typename T, int kTiles, int kSteps>
__global__ void __launch_bounds__(kTiles == 1 ? 640 : kThreads, 1) multiply_early(const Work<T> work) {
  extern __shared__ __align__(128) unsigned char shared[];
  const Product<G128, T>& p = work.p;
  const Division& by = work.by;
  uint64_t *full = reinterpret_cast<uint64_t*>(shared), *empty = full + kMostStages;
  float2* of_warps = reinterpret_cast<float2*>(shared + kBarriers);
  uint8_t* stages = shared + kBarriers + kWarps * kWarpSlot<kTiles> * int(sizeof(float2));
  float2* of_ranks = reinterpret_cast<float2*>(stages + by.stages * by.bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = by.ranks > 1 ? cluster_rank() : 0;
  const int tile0 = blockIdx.x / by.ranks * by.tiles, tiles = min(by.tiles, work.all_tiles - tile0);
  const int first = rank * by.groups, groups = min(by.groups, work.all_groups - first);
  const int steps = (groups + kWarps - 1) / kWarps, all = tiles * steps;
  const auto fill = [&](int i) {
    fill_stage(work, stages, full, tile0 + i / steps, first, groups, i % steps, i % by.stages);
  };

  let_next_start();
  if (warp == 0) {
    if (lane == 0) {
      for (int stage = 0; stage < by.stages; ++stage) barrier_init(full + stage, 1), barrier_init(empty + stage, kWarps);
      barrier_init_fence();
    }
    __syncwarp();
    if (!by.constant) wait_for_previous();
#pragma unroll 1  // a cold kernel waits for each of its instructions to come from memory
    for (int i = 0; i < min(by.stages, all); ++i) fill(i);
  }
  by.ranks > 1 ? cluster_sync_relaxed() : __syncthreads();  // of a cluster all blocks have started

  wait_for_previous();
  const PartOfX<T, kTiles, kSteps> x(p, first, groups, warp, lane);
  int stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    const int tile = tile0 + i;
    float sums[kTiles][4] = {};
    T scale[kSteps][2], zero[kSteps][2];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s >= steps) break;
      barrier_wait(full + stage, parity);  //@ full
      const uint8_t* at = stages + stage * by.bytes;
      if (s == 0) {
        const T* of_row = reinterpret_cast<const T*>(at + kWeights) + lane / 4 * work.all_groups + first + warp;
#pragma unroll
        for (int later = 0; later < kSteps; ++later)
          for (int half = 0; half < 2; ++half) {
            const T* mine = of_row + half * kHalf * work.all_groups + later * kWarps;  //@ half_of_scale
            const bool there = later * kWarps + warp < groups;
            scale[later][half] = there ? *mine : T(0.0f);
            zero[later][half] = there && p.weights.zeros ? mine[kRows * work.all_groups] : T(8.0f);
          }
      }
      if (s * kWarps + warp < groups) {
        const uint8_t* words = at + lane / 4 * kRowSlot + warp * kGroupBytes + lane % 4 * 16;
        const float scales[2] = {float(scale[s][0]), float(scale[s][1])}, zeros[2] = {float(zero[s][0]), float(zero[s][1])};
        multiply_group<T, kTiles>(sums, words, words + kHalf * kRowSlot, x.words[s], x.sums[s], scales, zeros);
      }
      __syncwarp();  // all lanes have multiplied what they read of the stage
      if (lane == 0) barrier_arrive(empty + stage);
      // The warps take turns in filling the stage that came before, with which the others are done or nearly so.
      const int before = i * steps + s - 1, next = before + by.stages;
      if (before >= 0 && next < all && next % kWarps == warp) {
        barrier_wait(empty + before % by.stages, before / by.stages & 1);  //@ empty
        fill(next);
      }
      if (++stage == by.stages) stage = 0, parity ^= 1;
    }

    if (i > 0) named_barrier_sync(2, kThreads);  //@ read
    float2* mine = of_warps + warp * kWarpSlot<kTiles> + lane / 4;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * j + lane % 4 * 2 + e;
        if (column < p.m) mine[column * kColumnSlot] = {sums[j][e], sums[j][2 + e]};
      }
    named_barrier_sync(1, kThreads);  //@ written
    constexpr int kParts = 8 / kTiles;  // threads that add up the sums of one row and column
    const int part = threadIdx.x % kParts, row = threadIdx.x / kParts % kHalf, column = threadIdx.x / kParts / kHalf;
    float2 sum{};
    if (column < p.m)
#pragma unroll
      for (int w = 0; w < kWarps; w += kParts) {
        const float2 more = of_warps[(w + part) * kWarpSlot<kTiles> + column * kColumnSlot + row];
        sum.x += more.x, sum.y += more.y;
      }
#pragma unroll
    for (int mask = kParts / 2; mask > 0; mask /= 2) {
      sum.x += __shfl_xor_sync(0xffffffff, sum.x, mask);
      sum.y += __shfl_xor_sync(0xffffffff, sum.y, mask);
    }
    if (part == 0 && column < p.m) {
      if (by.ranks == 1) store(work, tile, row, column, sum);
      else store_at_block(of_ranks + place_of_sums(work, rank, i) + column * kHalf + row, sum, i % by.ranks);  //@ owner
    }
  }

  if (by.ranks == 1) return;
  cluster_sync();  //@ all_sent
  for (int i = rank; i < tiles; i += by.ranks)
    for (int item = threadIdx.x; item < kHalf * p.m; item += kThreads) {
      float2 sum{};
      for (int sender = 0; sender < by.ranks; ++sender) {
        const float2 more = of_ranks[place_of_sums(work, sender, i) + item];  //@ sender
        sum.x += more.x, sum.y += more.y;
      }
      store(work, tile0 + i, item % kHalf, item / kHalf, sum);
    }
}

template <int kTiles, int kSteps, typename T>
int clusters_of(int ranks) {
  int clusters = 0;
  allow_shared(multiply_early<T, kTiles, kSteps>, kShared);
  STD_CUDA_CHECK(clusters_at_once(&clusters, multiply_early<T, kTiles, kSteps>, ranks, kThreads, kShared));
  return std::max(clusters, 1);
}

template <int kTiles, int kSteps, typename T>
void launch_division(Work<T> work, int ranks, int clusters) {
  Division& by = work.by;
  by.ranks = ranks, by.groups = (work.all_groups + ranks - 1) / ranks;
  by.tiles = (work.all_tiles + clusters - 1) / clusters;
  const int of_tile = kHalf * work.p.m * int(sizeof(float2));  // bytes of the sums of a rank
  if (ranks > 1) by.tiles = std::min(by.tiles, kMostOfRanks / of_tile);
  by.bytes = kWeights + (work.p.weights.zeros ? 2 : 1) * kRows * work.all_groups * int(sizeof(T));
  const int of_ranks = ranks > 1 ? (by.tiles + ranks - 1) / ranks * ranks * of_tile : 0;
  const int others = kBarriers + kWarps * kWarpSlot<kTiles> * int(sizeof(float2)) + of_ranks;
  by.stages = std::min({(kShared - others) / by.bytes, by.tiles * ((by.groups + kWarps - 1) / kWarps), kMostStages});
  const int blocks = (work.all_tiles + by.tiles - 1) / by.tiles * ranks, bytes = others + by.stages * by.bytes;
  STD_CUDA_CHECK(launch_early(multiply_early<T, kTiles, kSteps>, ranks, dim3(blocks), kThreads, bytes, work.p.stream, work));
}

// Chooses how many blocks share k: what gives a block the fewest groups; of equal ones, the fewest.
template <int kTiles, int kMostSteps, typename T>
void launch_tiles(const Work<T>& work) {
  int best = 0, best_clusters = 1;
  int64_t least = INT64_MAX;
  for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
    const int groups = (work.all_groups + ranks - 1) / ranks;
    if (groups > kMostSteps * kWarps || (ranks - 1) * groups >= work.all_groups) continue;
    const int clusters = groups > kWarps ? clusters_of<kTiles, kMostSteps, T>(ranks) : clusters_of<kTiles, 1, T>(ranks);
    const int64_t cost = int64_t((work.all_tiles + clusters - 1) / clusters) * groups;
    if (cost < least) least = cost, best = ranks, best_clusters = clusters;
  }
  STD_TORCH_CHECK(best > 0, "quant_gemm: x must have rows of at most ", kMostRanks * kMostSteps * kWarps * 128,
                  " elements for this kernel, got ", work.p.k);
  if ((work.all_groups + best - 1) / best > kWarps) launch_division<kTiles, kMostSteps>(work, best, best_clusters);
  else launch_division<kTiles, 1>(work, best, best_clusters);
}

template <typename T>
void launch_with(const Product<G128, T>& p, bool gated, bool constant) {
  Work<T> work{p, {}, p.k / 128, 0, 0};
  work.by.gated = gated, work.by.constant = constant;
  const int halves = p.n / kHalf;
  work.all_tiles = (halves + 1) / 2, work.high_row = gated ? p.n / 2 : kHalf;
  STD_TORCH_CHECK(p.m <= kMostM, "quant_gemm: x must have at most ", kMostM, " rows for this kernel, got ", p.m);
  STD_TORCH_CHECK(p.n % (gated ? kRows : kHalf) == 0, "quant_gemm: w must have a multiple of ", gated ? kRows : kHalf,
                  " rows for this kernel, got ", p.n);
  check_pieces(p.weights.w, p.k / 2, p.k / 2, "quant_gemm: w");
  check_pieces(p.x, p.k, p.k, "quant_gemm: x");
  check_pieces(p.weights.scales, 8, 8, "quant_gemm: scales", 16);
  if (p.weights.zeros) check_pieces(p.weights.zeros, 8, 8, "quant_gemm: zeros", 16);
  if (p.m <= 8) launch_tiles<1, 2>(work);
  else if (p.m <= 16) launch_tiles<2, 2>(work);
  else launch_tiles<4, 1>(work);
}

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  if constexpr (std::is_same_v<F, G128>) launch_with(p, false, false);
  else STD_TORCH_CHECK(false, "quant_gemm: w must be int4 in groups of 128 for this kernel");
}

// For w, scales and zeros that no launch before this one writes, unless all launches that did have ended. Where `zeros` is
// empty, all are 8. `gated`: y (m, n / 2) is SwiGLU, whose gate has the first half of the rows of W.
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
    if (y.numel() > 0) launch_with(p, gated, true);
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
