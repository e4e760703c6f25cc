// v03_wgmma: grouped products with wgmma, as a persistent kernel: one warpgroup copies, two multiply 64 rows each.
// Idea: gated_unit's v03 with scattered rows of x. A TMA box has adjacent rows only, so x comes by cp.async: 128 threads copy
// 16 bytes of 8 rows each, in the order of the swizzle, and signal a stage when it has arrived. The rows of weights and of h
// are adjacent and come by TMA. One warpgroup alone multiplies a tile of at most 64 rows, in half the time, so that the last
// tile of an expert wastes half of a tile at most. The sums of a tile are stored while the next tile is multiplied, 16 rows of
// 128 bytes at a time.
// Expected: at 4096 tokens, 8 of 128, 2048 x 768, experts have 256 rows, and tiles of 64 make 288 of them: 89 % of the rate of
// hgemm's v11, 650 TFLOP/s for both products, 475 us. With 40 us for the sum of 134 MB that is 600 TFLOP/s in all.
// Measured (H200, bfloat16, uniform, tokens=4096, experts=8, k=2, hidden=4096, ffn=14336): 676.7 TFLOP/s cold; 124.6 % of
//   torch.
#include "combine.cuh"
#include "cuda/counters.cuh"
#include "cuda/cp_async_arrive.cuh"
#include "cuda/gemm/warpgroup_tile.cuh"
#include "cuda/row_groups.cuh"

namespace minfer {

constexpr int kBlockM = 128, kBlockN = 256, kStages = 4;  // 192 KB; Wg and Wu have 128 columns each
constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * 128;
constexpr int kHigh = 8;    // tiles below each other that come before the next column of tiles
constexpr int kLag = 1;     // steps that the second warpgroup starts later: one's epilogue overlaps the other's products

// One of the two products: h = silu(x Wg) * (x Wu), (slots, ffn) in the order of `order`; or the result of each slot.
template <typename T_, bool kGated_>
struct Grouped {
  using T = T_;
  static constexpr bool kGated = kGated_;
  static constexpr int kColumns = kGated ? kBlockN / 2 : kBlockN;  // columns of a tile that are stored
  using Tile = WarpgroupTile<T, Layout::TN, 64, kBlockN>;
  using Result = WarpgroupTile<T, Layout::TN, 64, kColumns>;
  static constexpr int kA = kBlockM * kBlockK, kB = kBlockN * kBlockK, kStage = kA + kB;  // elements
  static constexpr int kBytes =
      (kStages * kStage + kConsumers * 4 * Result::kBox) * sizeof(T) + (2 * kStages + 1) * sizeof(uint64_t);
  static_assert(kBytes + sizeof(RowGroups<kBlockM>) <= 227 << 10, "more than a block has");

  Experts<T> p;
  T *h, *parts;
  int columns, depth, across, steps;

  Grouped(const Experts<T>& p, T* h, T* parts)
      : p(p), h(h), parts(parts), columns(kGated ? p.ffn : p.hidden), depth(kGated ? p.hidden : p.ffn),
        across(ceil_div(columns, kColumns)), steps(ceil_div(depth, kBlockK)) {}

  __device__ unsigned slot_at(int place) const { return min(unsigned(p.order[place]), unsigned(p.slots - 1)); }
  // Where a row of the result goes.
  __device__ T* row_at(int place) const {
    if constexpr (kGated) return h + place * int64_t(p.ffn);
    else return parts + slot_at(place) * int64_t(p.hidden);
  }
};

struct GroupedMaps {
  TensorMap rows, weights;  // rows: of h, for the second product
};

// What a thread of the copying warpgroup copies of a tile: 16 bytes of every 16th row.
template <typename Problem>
struct GatheredRows {
  using T = typename Problem::T;
  static constexpr int kRowStep = 16, kRows = kBlockM / kRowStep;
  const T* from[kRows];
  int at, col, count;

  __device__ GatheredRows(const Problem& g, const GroupTile& tile) : count(tile.rows > 64 ? kRows : kRows / 2) {  //@ half_rows
    const int row = threadIdx.x % 128 / 8;
    col = threadIdx.x % 8 * 8, at = Swizzled<kBlockK>::at(row, col);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int place = tile.begin + min(row + i * kRowStep, tile.rows - 1);
      from[i] = g.p.x + g.slot_at(place) / g.p.k * g.p.ldx + col;
    }
  }
  __device__ void start(T* stage, int k, int depth) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (i < count) cp_async_16(stage + at + i * kRowStep * kBlockK, from[i] + k, k + col < depth);
  }
};

// Fills stages with the tiles of a block. All threads of the copying warpgroup call it.
template <typename Problem>
__device__ void copy_tiles(const Problem& g, const GroupedMaps& maps, const RowGroups<kBlockM>& groups,
                           typename Problem::T* stages, uint64_t* full, uint64_t* empty) {
  using T = typename Problem::T;
  const bool is_first = threadIdx.x % 128 == 0;
  Ring<kStages> ring;
  for (int number = blockIdx.x, tiles = groups.tiles(g.across); number < tiles; number += gridDim.x) {
    const GroupTile tile = groups.find(number, g.across, kHigh);
    const int weight = tile.group * (Problem::kGated ? 2 : 1) * g.columns + tile.col * Problem::kColumns;
    const auto start = [&](int step, auto rows) {
      T* stage = stages + ring.stage * Problem::kStage;
      barrier_wait(empty + ring.stage, ring.parity ^ 1);
      if (is_first) {
        const bool both = tile.rows > 64;
        const int a = Problem::kGated ? 0 : (both ? 2 : 1) * kSlab;
        barrier_expect(full + ring.stage, (a + Problem::kB) * sizeof(T));
        if constexpr (!Problem::kGated) {
          tma_load(stage, maps.rows, full + ring.stage, step * kBlockK, tile.begin);
          if (both) tma_load(stage + kSlab, maps.rows, full + ring.stage, step * kBlockK, tile.begin + 64);
        }
#pragma unroll
        for (int i = 0; i < kBlockN / 128; ++i)  // 128 columns: of Wg and of Wu, or the next ones of Wd
          tma_load(stage + Problem::kA + i * 2 * kSlab, maps.weights, full + ring.stage, step * kBlockK,
                   weight + i * (Problem::kGated ? g.columns : 128));
      }
      rows(stage, step * kBlockK);
      ring.advance();
    };
    if constexpr (Problem::kGated) {
      const GatheredRows<Problem> x(g, tile);
#pragma unroll 1
      for (int step = 0; step < g.steps; ++step) {
        start(step, [&](T* stage, int k) {
          x.start(stage, k, g.depth);
          cp_async_arrive(full + ring.stage);  //@ rows_arrived
        });
      }
    } else if (is_first) {
#pragma unroll 1
      for (int step = 0; step < g.steps; ++step) start(step, [](T*, int) {});
    }
  }
}

// Stores the rows of a finished tile, 64 columns at a time, while the next tile is multiplied.
template <typename Problem>
struct OutgoingRows {
  using T = typename Problem::T;
  using Result = typename Problem::Result;
  static constexpr int kBoxes = Result::kAllBoxes;
  uint32_t bits[kBoxes][16];
  int place, rows, col0, next = kBoxes;  // of this warp

  __device__ void take(const Result& result, const GroupTile& tile, int first) {
    place = tile.begin + first, rows = tile.rows - first, col0 = tile.col * Problem::kColumns, next = 0;
#pragma unroll
    for (int j = 0; j < kBoxes; ++j) result.pack(bits[j], j);
  }
  __device__ bool rests() const { return next == kBoxes; }

  // Through this warp's shared memory for 16 rows, so that 8 lanes write 128 bytes of a row.
  __device__ void store_next(const Problem& g, T* box) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 4; ++n)
      stmatrix_x4(box + Swizzled<64>::at(lane % 16, n * 16 + lane / 16 * 8),
                  {bits[0][n * 4], bits[0][n * 4 + 1], bits[0][n * 4 + 2], bits[0][n * 4 + 3]});
#pragma unroll
    for (int i = 0; i < (kBoxes - 1) * 16; ++i)  // registers cannot be indexed at run time: shift the next box to the front
      bits[i / 16][i % 16] = bits[i / 16 + 1][i % 16];
    __syncwarp();
#pragma unroll 1  // the sums leave no registers for more rows at once
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8, in_box = lane % 8 * 8, col = col0 + next * 64 + in_box;
      if (row < rows && col < g.columns)
        *reinterpret_cast<uint4*>(g.row_at(place + row) + col) =
            *reinterpret_cast<const uint4*>(box + Swizzled<64>::at(row, in_box));
    }
    __syncwarp();  // the next box uses the same shared memory
    ++next;
  }
};

// Multiplies the tiles of a block: 64 rows of each. All threads of one of the other warpgroups call it.
template <typename Problem>
__device__ void multiply_tiles(const Problem& g, const RowGroups<kBlockM>& groups, const typename Problem::T* stages,
                               typename Problem::T* box, uint64_t* full, uint64_t* empty, uint64_t* begun) {
  const int warpgroup = warpgroup_index(), tiles = groups.tiles(g.across), first = warpgroup * 64;
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage);
  };
  typename Problem::Tile sums;
  OutgoingRows<Problem> outgoing;
  Ring<kStages> ring;
  int until = warpgroup == 0 ? min(kLag, g.steps) - 1 : -1;  // the step after which the other warpgroup may begin
  int number = blockIdx.x;
  if (number >= tiles) return;
  if (kLag > 0 && warpgroup == 1) barrier_wait(begun, 0);
  GroupTile tile = groups.find(number, g.across, kHigh), next = tile;
  for (; number < tiles; number += gridDim.x, tile = next) {
    const bool has_rows = first < tile.rows;
    const auto start = [&](int stage, int step) {
      const typename Problem::T* a = stages + stage * Problem::kStage;
      if constexpr (Problem::kGated) fence_async();  // wgmma sees what cp.async has written  //@ fence
      if (has_rows) sums.multiply(a + first * kBlockK, a + Problem::kA, step == 0);
    };
    const auto beside = [&](int step) {
      if (step == until) {
        if (threadIdx.x % 32 == 0) barrier_arrive(begun);
        until = -1;
      }
      if (step == 0 && number + int(gridDim.x) < tiles) next = groups.find(number + gridDim.x, g.across, kHigh);
      while (!outgoing.rests()) {  // 64 columns a step, and all that are left in the last step
        outgoing.store_next(g, box);
        if (step + 1 < g.steps) break;
      }
    };
    const int last = multiply_steps(ring, full, 0, g.steps, start, beside, release);
    wgmma_finish(sums.sums);
    release(last);
    if (!has_rows) continue;
    const int row = first + threadIdx.x / 32 % 4 * 16;  // this warp's
    if constexpr (Problem::kGated) {
      typename Problem::Result result;
#pragma unroll
      for (int i = 0; i < Problem::Result::kRegisters; ++i)
        result.sums[0][i] = swiglu(sums.sums[0][i], sums.sums[0][Problem::Result::kRegisters + i]);
      outgoing.take(result, tile, row);
    } else {
      outgoing.take(sums, tile, row);
    }
  }
  while (!outgoing.rests()) outgoing.store_next(g, box);
}

template <typename Problem>
__global__ void __launch_bounds__(kThreads, 1)
    product(const __grid_constant__ GroupedMaps maps, const __grid_constant__ Problem g) {
  using T = typename Problem::T;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ RowGroups<kBlockM> groups;
  T *stages = reinterpret_cast<T*>(shared), *boxes = stages + kStages * Problem::kStage;
  uint64_t* full = reinterpret_cast<uint64_t*>(boxes + kConsumers * 4 * Problem::Result::kBox);
  uint64_t *empty = full + kStages, *begun = empty + kStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(full + stage, Problem::kGated ? 1 + 128 : 1), barrier_init(empty + stage, kConsumers * 4);
    barrier_init(begun, 4);
  }
  barrier_init_fence();
  groups.count(g.p.offsets, g.p.experts, g.p.slots);  // has a barrier of all threads
  if (warpgroup_index() == kConsumers) {
    registers_down<40>();
    copy_tiles(g, maps, groups, stages, full, empty);
  } else {
    registers_up<232>();
    multiply_tiles(g, groups, stages, boxes + threadIdx.x / 32 * Problem::Result::kBox, full, empty, begun);
  }
}

template <bool kGated, typename T>
void launch_product(const Experts<T>& p, T* h, T* parts) {
  using Problem = Grouped<T, kGated>;
  const Problem g(p, h, parts);
  GroupedMaps maps;
  const T* weights = kGated ? p.gate_up : p.down;
  STD_TORCH_CHECK(make_tensor_map(maps.rows, h, p.slots, p.ffn, p.ffn, 64, kBlockK) &&
                      make_tensor_map(maps.weights, weights, p.experts * (kGated ? 2 : 1) * g.columns, g.depth, g.depth,
                                      128, kBlockK),
                  "moe_ffn: the driver knows no tensor map for these operands; it must be one of CUDA 12 or newer");
  allow_shared(product<Problem>, Problem::kBytes);
  product<Problem><<<dim3(multiprocessors()), kThreads, Problem::kBytes, p.stream>>>(maps, g);
}

template <typename T>
void launch(const Experts<T>& p) {
  require_pieces(p);
  STD_TORCH_CHECK(p.experts <= kMostGroups, "moe_ffn: this kernel takes at most ", kMostGroups, " experts, got ", p.experts);
  const auto memory = scratch_words((int64_t(p.slots) * (p.ffn + p.hidden) + 1) / 2);
  T *h = static_cast<T*>(memory.mutable_data_ptr()), *parts = h + int64_t(p.slots) * p.ffn;
  launch_product<true>(p, h, parts);
  launch_product<false>(p, h, parts);
  launch_combine(p, parts);
}

}  // namespace minfer

MINFER_MOE_FFN(moe_ffn_v03_wgmma, minfer::launch)
