// v02_mma: two grouped products with mma.sync: cp.async gathers the rows of x, SwiGLU is computed in registers, and the results
// of slots are scattered.
// Idea: a tile belongs to one expert. It takes scattered rows of x, to which its threads keep pointers, and the same columns
// of Wg and of Wu, so that one thread has both sums of an element. Each block counts the experts' tiles from their
// offsets on the device: the grid has as many blocks as there may be tiles at most, and a block without a tile exits. Where
// experts have few rows, tiles have few too.
// Expected: on an H200 the 430 TFLOP/s of gated_unit's v02, less the rows by which tiles of 128 are not full: a fifth, where
// experts have 256 rows on average. On an L40S the same share of its 362 TFLOP/s. With few rows, memory's speed.
// Measured (H200, bfloat16, uniform, tokens=4096, experts=8, k=2, hidden=4096, ffn=14336): 273.8 TFLOP/s cold; 50.4 % of torch.
#include "combine.cuh"
#include "cuda/counters.cuh"
#include "cuda/gemm/block_tile.cuh"
#include "cuda/row_groups.cuh"

namespace minfer {

// kWeights is 2 for Wg and Wu, of which a tile has kBlockN columns each, and 1 for Wd.
template <typename T_, int kWeights_, int kBlockM_, int kBlockN_, int kBlockK_, int kStages_, int kWarpM_, int kWarpN_>
struct Shape {
  using T = T_;
  using Warp = WarpTile<T, float, Layout::TN, kWarpM_, kWarpN_>;
  static constexpr int kWeights = kWeights_, kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = kBlockK_, kStages = kStages_;
  static constexpr int kWarpM = kWarpM_, kWarpN = kWarpN_, kWarpsN = kBlockN / kWarpN;
  static constexpr int kThreads = 32 * (kBlockM / kWarpM) * kWarpsN;
  using Place = Swizzled<kBlockK>;
  static constexpr int kX = kBlockM * kBlockK, kW = kBlockN * kBlockK, kStage = kX + kWeights * kW;  // elements
  static constexpr int kBytes = kStages * kStage * sizeof(T);
  // A block, with its table of tiles, fits an SM of sm_89.
  static_assert(kBytes + sizeof(RowGroups<kBlockM>) <= 99 << 10);
  static_assert(kThreads / 32 * Warp::kStaged <= kStages * kStage);
};

// Copies tile after tile of scattered rows along k: each thread copies the same 16-byte pieces of each tile. Rows from `rows`
// on are zero.
template <typename Shape>
struct GatheredCopy {
  using T = typename Shape::T;
  static constexpr int kPieces = Shape::kBlockK / 8, kRowStep = Shape::kThreads / kPieces, kRows = Shape::kBlockM / kRowStep;
  static_assert(Shape::kThreads % kPieces == 0 && Shape::kBlockM % kRowStep == 0 && kRowStep % 8 == 0);

  const T* source[kRows];  // this thread's first piece of the next tile
  int rows_left, cols_left, at;

  template <typename RowAt>
  __device__ GatheredCopy(RowAt row_at, int rows, int cols) {
    const int row = threadIdx.x / kPieces, col = threadIdx.x % kPieces * 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) source[i] = row_at(min(row + i * kRowStep, rows - 1)) + col;
    rows_left = rows - row, cols_left = cols - col, at = Shape::Place::at(row, col);
  }

  __device__ void start(T* tile) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      cp_async_16(tile + at + i * kRowStep * Shape::kBlockK, source[i], i * kRowStep < rows_left && cols_left > 0);
      source[i] += Shape::kBlockK;
    }
    cols_left -= Shape::kBlockK;
  }
};

// Computes the sums of a tile, over `depth` elements in k. `x` copies the rows of x. Weight i has `columns` columns, each
// contiguous, from w[i] on; the tile takes those from col0 on.
template <typename Shape>
__device__ void multiply(typename Shape::Warp (&sums)[Shape::kWeights], GatheredCopy<Shape>& x,
                         const typename Shape::T* const (&w)[Shape::kWeights], int col0, int columns, int depth,
                         typename Shape::T* stages, int row, int col) {
  using T = typename Shape::T;
  using Warp = typename Shape::Warp;
  using Place = typename Shape::Place;
  using CopyW = TileCopy<Place, false, Shape::kBlockN, Shape::kBlockK, Shape::kThreads, T>;
  const int tiles = (depth + Shape::kBlockK - 1) / Shape::kBlockK, lane = threadIdx.x % 32;
  CopyW first(w[0], depth, col0, 0, columns, depth), last(w[Shape::kWeights - 1], depth, col0, 0, columns, depth);
  const auto copy = [&](int tile) {
    T* stage = stages + tile % Shape::kStages * Shape::kStage;
    if (tile < tiles) {
      x.start(stage), first.start(stage + Shape::kX);
      if constexpr (Shape::kWeights > 1) last.start(stage + Shape::kX + Shape::kW);
    }
    cp_async_commit();  // an empty group too, so that the number of groups in flight is constant
  };

  for (int tile = 0; tile < Shape::kStages - 1; ++tile) copy(tile);
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<Shape::kStages - 2>();
    __syncthreads();  // this tile has arrived for all threads, and all are done with the previous one,
    copy(tile + Shape::kStages - 1);  // whose stage is filled next
    const T* stage = stages + tile % Shape::kStages * Shape::kStage;
#pragma unroll
    for (int k = 0; k < Shape::kBlockK; k += 16) {
      typename Warp::Fragments of[Shape::kWeights];
      Warp::template load_a<Place>(of[0], stage, row, k, lane);
#pragma unroll
      for (int i = 0; i < Shape::kWeights; ++i)
        Warp::template load_b<Place>(of[i], stage + Shape::kX + i * Shape::kW, col, k, 0, lane);
#pragma unroll
      for (int i = 0; i < Shape::kWeights; ++i) sums[i].multiply(of[0].a, of[i].b, 0);
    }
  }
  __syncthreads();  // no warp reads fragments any more, and each has a part of shared memory to itself
}

// Writes a warp's rounded sums through its own part of shared memory: row i to row_at(i), for i below `rows`, and the columns
// below `cols`.
template <typename T, typename Warp, typename RowAt>
__device__ void store_rows(const Warp& tile, int rows, int cols, T* staged, RowAt row_at) {
  constexpr int kColumns = sizeof(tile.sums[0]) / sizeof(tile.sums[0][0]) * 8, kPieces = kColumns / 8;
  using Place = Padded<kColumns>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < int(sizeof(tile.sums) / sizeof(tile.sums[0])); ++i) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<typename Warp::Pair*>(staged + Place::at(half * 8 + lane / 4, j * 8 + lane % 4 * 2)) = {
            T(tile.sums[i][j][2 * half]), T(tile.sums[i][j][2 * half + 1])};
    __syncwarp();
#pragma unroll
    for (int piece = lane; piece < 16 * kPieces; piece += 32) {
      const int row = piece / kPieces, col = piece % kPieces * 8;
      if (i * 16 + row < rows && col < cols)
        *reinterpret_cast<uint4*>(row_at(i * 16 + row) + col) = *reinterpret_cast<const uint4*>(staged + Place::at(row, col));
    }
    __syncwarp();
  }
}

constexpr int kHigh = 16;  // tiles below each other that come before the next column of tiles

// With Wg and Wu: h = silu(x Wg) * (x Wu), (slots, ffn), in the order of `order`. With Wd: the result of each slot, (slots,
// hidden).
template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    product(Experts<typename Shape::T> p, typename Shape::T* h, typename Shape::T* parts) {
  using T = typename Shape::T;
  constexpr bool kGated = Shape::kWeights == 2;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ RowGroups<Shape::kBlockM> groups;
  T* stages = reinterpret_cast<T*>(shared);
  groups.count(p.offsets, p.experts, p.slots);
  const int columns = kGated ? p.ffn : p.hidden, depth = kGated ? p.hidden : p.ffn;
  const int across = (columns + Shape::kBlockN - 1) / Shape::kBlockN;
  if (int(blockIdx.x) >= groups.tiles(across)) return;
  const GroupTile tile = groups.find(blockIdx.x, across, kHigh);
  const int warp = threadIdx.x / 32, col0 = tile.col * Shape::kBlockN;
  const int row = warp / Shape::kWarpsN * Shape::kWarpM, col = warp % Shape::kWarpsN * Shape::kWarpN;
  const auto slot_at = [&](int i) { return min(unsigned(p.order[tile.begin + i]), unsigned(p.slots - 1)); };

  GatheredCopy<Shape> x(
      [&](int i) -> const T* {
        if constexpr (kGated) return p.x + slot_at(i) / p.k * p.ldx;  //@ slot
        else return h + (tile.begin + i) * int64_t(p.ffn);
      },
      tile.rows, depth);
  const int64_t weight = int64_t(columns) * depth;
  typename Shape::Warp sums[Shape::kWeights];
  if constexpr (kGated) {
    const T* gate = p.gate_up + tile.group * 2 * weight;
    multiply<Shape>(sums, x, {gate, gate + weight}, col0, columns, depth, stages, row, col);
#pragma unroll
    for (int i = 0; i < Shape::kWarpM / 16; ++i)
#pragma unroll
      for (int j = 0; j < Shape::kWarpN / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[0].sums[i][j][e] = swiglu(sums[0].sums[i][j][e], sums[1].sums[i][j][e]);
  } else {
    multiply<Shape>(sums, x, {p.down + tile.group * weight}, col0, columns, depth, stages, row, col);
  }
  T* staged = stages + warp * Shape::Warp::kStaged;
  store_rows<T>(sums[0], tile.rows - row, columns - col0 - col, staged, [&](int i) -> T* {
    if constexpr (kGated) return h + (tile.begin + row + i) * int64_t(p.ffn) + col0 + col;
    else return parts + slot_at(row + i) * int64_t(p.hidden) + col0 + col;
  });
}

template <typename Shape, typename T>
void launch_product(const Experts<T>& p, T* h, T* parts) {
  const int columns = Shape::kWeights == 2 ? p.ffn : p.hidden;
  // As many rows of tiles as there may be at most: the last tile of each expert may have a single row.
  const int64_t most = std::min<int64_t>(p.slots, p.slots / Shape::kBlockM + p.experts);
  const int64_t grid = most * ((columns + Shape::kBlockN - 1) / Shape::kBlockN);
  STD_TORCH_CHECK(grid <= INT_MAX, "moe_ffn: more tiles than a launch has blocks");
  allow_shared(product<Shape>, Shape::kBytes);
  product<Shape><<<dim3(grid), Shape::kThreads, Shape::kBytes, p.stream>>>(p, h, parts);
}

template <typename T>
void launch(const Experts<T>& p) {
  require_pieces(p);
  STD_TORCH_CHECK(p.experts <= kMostGroups, "moe_ffn: this kernel takes at most ", kMostGroups, " experts, got ", p.experts);
  const auto memory = scratch_words((int64_t(p.slots) * (p.ffn + p.hidden) + 1) / 2);
  T *h = static_cast<T*>(memory.mutable_data_ptr()), *parts = h + int64_t(p.slots) * p.ffn;
  // By the mean number of rows, which the host knows. Tiles of 16 rows suffice where memory is the limit, of 64 where L2 is.
  const int mean = p.slots / p.experts;
  if (mean <= 16) {
    launch_product<Shape<T, 2, 16, 64, 64, 4, 16, 16>>(p, h, parts);
    launch_product<Shape<T, 1, 16, 64, 64, 4, 16, 16>>(p, h, parts);
  } else if (mean <= 96) {
    launch_product<Shape<T, 2, 64, 128, 32, 4, 32, 32>>(p, h, parts);
    launch_product<Shape<T, 1, 64, 128, 32, 4, 32, 32>>(p, h, parts);
  } else {
    launch_product<Shape<T, 2, 128, 128, 32, 3, 64, 32>>(p, h, parts);
    launch_product<Shape<T, 1, 128, 256, 32, 3, 64, 64>>(p, h, parts);
  }
  launch_combine(p, parts);
}

}  // namespace minfer

MINFER_MOE_FFN(moe_ffn_v02_mma, minfer::launch)
