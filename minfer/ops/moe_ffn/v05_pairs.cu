// v05_pairs: grouped products with wgmma whose tiles are as wide as an expert's rows: two blocks share the weights of a tile.
// Idea: v03 with the operands changed round. Weights are the 64 rows of wgmma and tokens its columns, of which it takes any
// multiple of 8: the rows of an expert are divided evenly among its tiles, whose widths are multiples of 16, so that a tile
// multiplies fewer than 16 rows too many on average. Two blocks of a cluster multiply the same 256 rows of weights with two
// halves of the tokens, and each copies half of the weights for both by TMA's multicast: a block reads 256 rows of 128 bytes a
// step from the L2, where v03 reads 384, and weights come from memory once even where blocks drift apart. stmatrix transposes
// what is stored.
// Expected: at 4096 tokens, 8 of 128, 2048 x 768, v03 waits for the L2, which delivers 6.8 TB/s, and for 1.4 GB from memory
// where 0.87 suffice. With two thirds of the bytes of L2 and 6 % of the work wasted, 700 TFLOP/s of useful work for both
// products, 440 us, and 43 us for the sum. A tuning run took 657 us there, and v03 719; with uneven routing and with 8 experts
// v03 won by 6 to 13 %.
// Measured (H200, bfloat16, uniform, tokens=4096, experts=8, k=2, hidden=4096, ffn=14336): 620.7 TFLOP/s cold; 114.3 % of
//   torch.
#include "combine.cuh"
#include "cuda/counters.cuh"
#include "cuda/cp_async_arrive.cuh"
#include "cuda/gemm/warpgroup_tile.cuh"
#include "cuda/row_groups.cuh"

namespace minfer {

constexpr int kWeightRows = 256, kStages = 4, kCluster = 2;
constexpr int kMostWidth = 160;  // tokens of a block's tile: 160 registers a thread for sums, and four stages of 52 KB
constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * 128;
constexpr int kLag = 1;     // steps that the second warpgroup starts later: one's epilogue overlaps the other's products
constexpr int kBoxes = 3;   // of 16 tokens x 16 columns, that a warp transposes at once

// The tiles of clusters. Those of experts with more rows come first: clusters take tiles in turn, and tiles of the same turn
// then are of one width, and those of the last, partly filled turn the narrowest.
struct Groups : RowGroups<kCluster * kMostWidth> {
  int16_t experts[kMostGroups];  // by their rows; `first` is in this order
  __device__ int rows_of(int expert) const { return begin[expert + 1] - begin[expert]; }

  __device__ void count(const int32_t* ends, int count, int all) {
    RowGroups::count(ends, count, all);
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      int before = 0;
      const int own = rows_of(i);
#pragma unroll 8
      for (int j = 0; j < count; ++j) before += rows_of(j) > own || (rows_of(j) == own && j < i);
      experts[before] = i;
    }
    __syncthreads();
    if (threadIdx.x < 32)
      for (int base = 0, tile = 0; base < count; base += 32) {
        const int at = base + threadIdx.x;
        const int own = at < count ? (rows_of(experts[at]) + kCluster * kMostWidth - 1) / (kCluster * kMostWidth) : 0;
        int sum = own;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
          const int other = __shfl_up_sync(0xffffffff, sum, by);
          if (threadIdx.x >= by) sum += other;
        }
        if (at < count) first[at] = tile + sum - own;
        tile += __shfl_sync(0xffffffff, sum, 31);
      }
    __syncthreads();
  }
};

// One of the two products: h = silu(x Wg) * (x Wu), (slots, ffn) in the order of `order`; or the result of each slot.
template <typename T_, bool kGated_>
struct Grouped {
  using T = T_;
  static constexpr bool kGated = kGated_;
  static constexpr int kColumns = kGated ? kWeightRows / 2 : kWeightRows;  // columns of a tile that are stored
  static constexpr int kA = kWeightRows * kBlockK, kStage = kA + kMostWidth * kBlockK;  // elements
  static constexpr int kBox = 256;
  static constexpr int kBytes =
      (kStages * kStage + kConsumers * 4 * kBoxes * kBox) * sizeof(T) + (2 * kStages + 1) * sizeof(uint64_t);
  static_assert(kBytes + sizeof(Groups) <= 227 << 10, "more than a block has");

  Experts<T> p;
  T *h, *parts;
  int columns, depth, across, steps;

  Grouped(const Experts<T>& p, T* h, T* parts)
      : p(p), h(h), parts(parts), columns(kGated ? p.ffn : p.hidden), depth(kGated ? p.hidden : p.ffn),
        across(ceil_div(columns, kColumns)), steps(ceil_div(depth, kBlockK)) {}

  __device__ unsigned slot_at(int place) const {
    return min(unsigned(p.order[min(place, p.slots - 1)]), unsigned(p.slots - 1));
  }
};

struct GroupedMaps {
  TensorMap rows, weights;  // rows: of h, for the second product
};

// A block's tile: `rows` of an expert from `begin` on, none of them in the worst case, and as many columns of wgmma as both
// blocks of the cluster need.
struct PairTile {
  int group, col, begin, rows, width;

  __device__ PairTile(const Groups& groups, int number, int across, int rank) {
    const int down = number / across;
    int at = 0, behind = groups.groups;  // first[at] <= down < first[behind]
    while (behind - at > 1) {
      const int middle = (at + behind) / 2;
      (groups.first[middle] <= down ? at : behind) = middle;
    }
    // All rows of tiles of an expert in a column follow each other: they run at once, with the same weights.
    const int within = number - groups.first[at] * across, tiles = groups.first[at + 1] - groups.first[at];
    group = groups.experts[at], col = within / tiles;  //@ experts
    const int all = groups.rows_of(group), halves = tiles * kCluster;
    width = ceil_div(ceil_div(all, halves), 16) * 16;
    const int before = (within % tiles * kCluster + rank) * width;  //@ rank
    begin = groups.begin[group] + before, rows = min(width, all - before);
  }
};

// Fills stages with the tiles of a block. All threads of the copying warpgroup call it.
template <typename Problem>
__device__ void copy_tiles(const Problem& g, const GroupedMaps& maps, const Groups& groups, typename Problem::T* stages,
                           uint64_t* full, uint64_t* empty, int rank) {
  using T = typename Problem::T;
  constexpr int kRowStep = 16, kRows = kMostWidth / kRowStep;  // what a thread copies of x: 16 bytes of every 16th row
  const bool is_first = threadIdx.x % 128 == 0;
  if constexpr (!Problem::kGated) wait_for_previous();  // for h
  const int row = threadIdx.x % 128 / 8, col = threadIdx.x % 8 * 8, at = Problem::kA + Swizzled<kBlockK>::at(row, col);
  Ring<kStages> ring;
  for (int number = blockIdx.x / kCluster, tiles = groups.tiles(g.across); number < tiles; number += gridDim.x / kCluster) {
    const PairTile tile(groups, number, g.across, rank);
    const int strips = tile.width / kRowStep;
    // This block copies the rows of weights of warpgroup `rank`, of both blocks: of Wg and of Wu, or of Wd.
    const int weight = tile.group * (Problem::kGated ? 2 : 1) * g.columns + tile.col * Problem::kColumns +
                       rank * (Problem::kGated ? 64 : 128);
    const auto start = [&](int step) {
      T* stage = stages + ring.stage * Problem::kStage;
      barrier_wait(empty + ring.stage, ring.parity ^ 1);
      if (is_first) {
        const int own = Problem::kGated ? 0 : strips * kRowStep * kBlockK;
        barrier_expect(full + ring.stage, (Problem::kA + own) * sizeof(T));
#pragma unroll
        for (int i = 0; i < 2; ++i)
          tma_load_multicast(stage + (rank * 2 + i) * kSlab, maps.weights, full + ring.stage, step * kBlockK,
                             weight + i * (Problem::kGated ? g.columns : 64), (1 << kCluster) - 1);
        if constexpr (!Problem::kGated)
          for (int i = 0; i < strips; ++i)
            tma_load(stage + Problem::kA + i * kRowStep * kBlockK, maps.rows, full + ring.stage, step * kBlockK,
                     tile.begin + i * kRowStep);
      }
      return stage;
    };
    if constexpr (Problem::kGated) {
      unsigned token[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        token[i] = g.slot_at(tile.begin + max(0, min(row + i * kRowStep, tile.rows - 1))) / g.p.k;
#pragma unroll 1
      for (int step = 0; step < g.steps; ++step, ring.advance()) {
        T* stage = start(step);
        const int k = step * kBlockK + col;
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          if (i < strips) cp_async_16(stage + at + i * kRowStep * kBlockK, g.p.x + token[i] * g.p.ldx + k, k < g.depth);
        cp_async_arrive(full + ring.stage);  //@ rows_arrived
      }
    } else if (is_first) {
#pragma unroll 1
      for (int step = 0; step < g.steps; ++step, ring.advance()) start(step);
    }
  }
}

// Stores what this warp has of a finished tile: for each token 16 columns of a block of sums, from which they are transposed
// in shared memory. Inline, because what is not inline would need the sums in memory.
template <typename Problem, int kWidth>
__device__ __forceinline__ void store_tile(const Problem& g, const PairTile& tile, float (&sums)[2][kWidth / 2],
                                           typename Problem::T* boxes, const unsigned (&slots)[(kMostWidth + 31) / 32]) {
  using T = typename Problem::T;
  constexpr int kBlocks = Problem::kGated ? 1 : 2, kAll = kWidth / 16 * kBlocks;
  const int lane = threadIdx.x % 32, warpgroup = warpgroup_index();
  const int col0 = tile.col * Problem::kColumns + warpgroup * (Problem::kColumns / 2) + threadIdx.x / 32 % 4 * 16;
  // In a box: a row for each token, of two pieces, whose order spreads four rows over all banks.
  const auto place = [](int token, int piece) { return token * 16 + (piece ^ token / 4 % 2) * 8; };
#pragma unroll
  for (int first = 0; first < kAll; first += kBoxes) {
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const int box = first + i, token = box / kBlocks * 16;
      if (box >= kAll) break;
      const float(&of)[kWidth / 2] = sums[box % kBlocks];
      uint32_t bits[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Pair<T> pair{T(of[token / 2 + e * 2]), T(of[token / 2 + e * 2 + 1])};
        memcpy(&bits[e], &pair, 4);
      }
      stmatrix_x4_transposed(boxes + i * Problem::kBox + place(lane / 16 * 8 + lane % 8, lane / 8 % 2), bits);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const int box = first + i;
      if (box >= kAll) break;
      const int token = box / kBlocks * 16 + lane / 2, col = col0 + box % kBlocks * 64 + lane % 2 * 8;
      const uint4 piece = *reinterpret_cast<const uint4*>(boxes + i * Problem::kBox + place(lane / 2, lane % 2));
      T* to;
      if constexpr (Problem::kGated) {
        to = g.h + (tile.begin + token) * int64_t(g.p.ffn);
      } else {
        const unsigned slot = __shfl_sync(0xffffffff, slots[box / kBlocks / 2], box / kBlocks % 2 * 16 + lane / 2);
        to = g.parts + slot * int64_t(g.p.hidden);
      }
      if (token < tile.rows && col < g.columns) *reinterpret_cast<uint4*>(to + col) = piece;
    }
    __syncwarp();  // the next boxes use the same shared memory
  }
}

// Calls f.operator()<width>().
template <int kWidth = 16, typename F>
__device__ __forceinline__ void with_width(int width, F f) {
  if constexpr (kWidth < kMostWidth)
    if (width > kWidth) return with_width<kWidth + 16>(width, f);
  f.template operator()<kWidth>();
}

// Multiplies the tiles of a block: 128 rows of weights of each. All threads of one of the other warpgroups call it.
template <typename Problem>
__device__ void multiply_tiles(const Problem& g, const Groups& groups, const typename Problem::T* stages,
                               typename Problem::T* boxes, uint64_t* full, uint64_t* empty, uint64_t* begun, int rank) {
  using T = typename Problem::T;
  const int warpgroup = warpgroup_index(), tiles = groups.tiles(g.across), lane = threadIdx.x % 32;
  const auto release = [&](int stage) {
    if (lane < kCluster) barrier_arrive_at(empty + stage, lane);
  };
  Ring<kStages> ring;
  int until = warpgroup == 0 ? min(kLag, g.steps) - 1 : -1;  // the step after which the other warpgroup may begin
  int number = blockIdx.x / kCluster;
  if (kLag > 0 && warpgroup == 1 && number < tiles) barrier_wait(begun, 0);
  for (; number < tiles; number += gridDim.x / kCluster) {
    const PairTile tile(groups, number, g.across, rank);
    unsigned slots[(kMostWidth + 31) / 32] = {};  // of every 32nd token, to be read before they are needed
    if constexpr (!Problem::kGated)
#pragma unroll
      for (int i = 0; i < int(sizeof(slots) / sizeof(slots[0])); ++i) slots[i] = g.slot_at(tile.begin + i * 32 + lane);
    with_width(tile.width, [&]<int kWidth>() {
      // Zero, although the first step adds nothing: otherwise the sums of all widths are live around the loop, and spilled.
      WarpgroupTile<T, Layout::TN, 128, kWidth> sums{};
      const auto start = [&](int stage, int step) {
        const T* a = stages + stage * Problem::kStage;
        if constexpr (Problem::kGated) fence_async();  // wgmma sees what cp.async has written  //@ fence
        sums.multiply(a + warpgroup * 2 * kSlab, a + Problem::kA, step == 0);
      };
      const auto beside = [&](int step) {
        if (step != until) return;
        if (lane == 0) barrier_arrive(begun);
        until = -1;
      };
      const int last = multiply_steps(ring, full, 0, g.steps, start, beside, release);
      wgmma_finish(sums.sums);
      release(last);
      if constexpr (Problem::kGated)
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) sums.sums[0][i] = swiglu(sums.sums[0][i], sums.sums[1][i]);
      store_tile<Problem, kWidth>(g, tile, sums.sums, boxes, slots);
    });
  }
}

template <typename Problem>
__global__ void __launch_bounds__(kThreads, 1)
    product(const __grid_constant__ GroupedMaps maps, const __grid_constant__ Problem g) {
  using T = typename Problem::T;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ Groups groups;
  T *stages = reinterpret_cast<T*>(shared), *boxes = stages + kStages * Problem::kStage;
  uint64_t* full = reinterpret_cast<uint64_t*>(boxes + kConsumers * 4 * kBoxes * Problem::kBox);
  uint64_t *empty = full + kStages, *begun = empty + kStages;
  let_next_start();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(full + stage, Problem::kGated ? 1 + 128 : 1), barrier_init(empty + stage, kCluster * kConsumers * 4);
    barrier_init(begun, 4);
  }
  barrier_init_fence();
  groups.count(g.p.offsets, g.p.experts, g.p.slots);  // has a barrier of all threads
  cluster_sync_relaxed();
  const int rank = cluster_rank();
  if (warpgroup_index() == kConsumers) {
    registers_down<72>();
    copy_tiles(g, maps, groups, stages, full, empty, rank);
  } else {
    registers_up<216>();
    multiply_tiles(g, groups, stages, boxes + threadIdx.x / 32 * kBoxes * Problem::kBox, full, empty, begun, rank);
  }
  cluster_sync_relaxed();  // no block ends while another arrives at its barriers
}

template <bool kGated, typename T>
void launch_product(const Experts<T>& p, T* h, T* parts) {
  using Problem = Grouped<T, kGated>;
  const Problem g(p, h, parts);
  GroupedMaps maps;
  const T* weights = kGated ? p.gate_up : p.down;
  STD_TORCH_CHECK(make_tensor_map(maps.rows, h, p.slots, p.ffn, p.ffn, 16, kBlockK) &&
                      make_tensor_map(maps.weights, weights, p.experts * (kGated ? 2 : 1) * g.columns, g.depth, g.depth,
                                      64, kBlockK),
                  "moe_ffn: the driver knows no tensor map for these operands; it must be one of CUDA 12 or newer");
  allow_shared(product<Problem>, Problem::kBytes);
  int clusters = 0;
  STD_CUDA_CHECK(clusters_at_once(&clusters, product<Problem>, kCluster, kThreads, Problem::kBytes));
  const dim3 blocks(std::max(1, clusters) * kCluster);
  if constexpr (kGated)
    STD_CUDA_CHECK(launch_clusters(product<Problem>, kCluster, blocks, kThreads, Problem::kBytes, p.stream, maps, g));
  else
    STD_CUDA_CHECK(launch_early(product<Problem>, kCluster, blocks, kThreads, Problem::kBytes, p.stream, maps, g));
}

template <typename T>
void launch(const Experts<T>& p) {
  require_pieces(p);
  STD_TORCH_CHECK(p.experts <= kMostGroups, "moe_ffn: this kernel takes at most ", kMostGroups, " experts, got ", p.experts);
  const auto memory = scratch_words((int64_t(p.slots) * (p.ffn + p.hidden) + 1) / 2);
  T *h = static_cast<T*>(memory.mutable_data_ptr()), *parts = h + int64_t(p.slots) * p.ffn;
  launch_product<true>(p, h, parts);
  launch_product<false>(p, h, parts);
  launch_combine_early(p, parts);
}

}  // namespace minfer

MINFER_MOE_FFN(moe_ffn_v05_pairs, minfer::launch)
