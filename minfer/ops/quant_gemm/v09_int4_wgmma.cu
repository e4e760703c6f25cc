// v09_int4_wgmma: int4 with more than 16 rows of x on Hopper: weights are unpacked in registers, where wgmma reads them as A.
// Idea: the operands are swapped, so that wgmma's 64 rows are rows of W and its columns rows of x (tokens). wgmma reads A from
// registers. TMA copies packed weights to shared memory, a quarter of the bytes. A warp reads them and unpacks them to
// fragments, scaled, in 5 instructions for two weights. While the tensor cores multiply 16 in k, the warpgroup unpacks the next
// 16. TMA copies x as it is stored. Tiles have 128 rows of W and 64 to 256 tokens. The host chooses the width of a tile, and
// how many blocks share its k, so that all waves together take the least time. These blocks are a cluster and add their sums
// through distributed shared memory. Where k is not shared, the kernel is persistent.
// Expected: unpacking takes 50 cycles of a scheduler where the tensor cores need kTokens cycles for 16 in k, so it is hidden
// from 64 tokens on. With many rows of x, bfloat16's rate, 0.95 of `torch.mm`; with few, the time of reading W. Tuning run on
// an H100: 16 in k take 68 + 0.35 kTokens ns, where the tensor cores need 0.65 kTokens ns at most. A warpgroup's products wait
// for each other, and with narrow tiles not even two warpgroups keep the tensor cores busy.
// Measured (H200, bfloat16, int4_g128, float32, m=2048, n=4096, k=4096): 725.4 TFLOP/s cold.
#include "int4_wgmma.cuh"

namespace minfer {

constexpr int kTileGroup = 8;  // tiles of tokens that a group of `grouped` has
constexpr int kScaleWarps = 2, kAheadOfScales = 2;

struct Int4Maps {
  TensorMap x, w, y;
};

// How a launch divides the work: the `splits` blocks of a cluster, a power of two, share a tile; each has a part of k.
struct Int4Grid {
  int tiles_x, tiles_w, steps, splits;
};

// A block's place in its cluster, and its steps in k.
struct Place {
  int split, begin, end;

  __device__ explicit Place(const Int4Grid& grid) : split(grid.splits > 1 ? cluster_rank() : 0) {
    begin = int(int64_t(grid.steps) * split / grid.splits), end = int(int64_t(grid.steps) * (split + 1) / grid.splits);
  }
};

template <typename T, int kGroup, int kTokens>
struct Int4Shared {
  using Stage = Int4Stage<kGroup, kTokens>;
  static constexpr int kOut = kConsumers * kBoxes * kBox * 2;
  static constexpr int kFit = ((227 << 10) - kOut - 256) / Stage::kBytes, kStages = kFit > 10 ? 10 : kFit;
  static constexpr int kBytes = kStages * Stage::kBytes + kOut + kStages * 2 * sizeof(uint64_t);
  static_assert(kStages >= 3 && kStages * Stage::kBytes >= SwappedTile<T, kTokens>::kExchange);
};

// Copies a block's steps of x and W, in one thread.
template <typename Stage, int kStages>
__device__ inline void load_steps(const Int4Maps& maps, uint8_t* stages, uint64_t* full, uint64_t* empty, Ring<kStages>& ring,
                                  int row, int token, Place place) {
#pragma unroll 1
  for (int step = place.begin; step < place.end; ++step, ring.advance()) {
    barrier_wait(empty + ring.stage, ring.parity ^ 1);
    uint64_t* filled = full + ring.stage;
    uint8_t* stage = stages + ring.stage * Stage::kBytes;
    barrier_expect(filled, Stage::kX + Stage::kW);
    tma_load(stage + Stage::kX, maps.w, filled, step * (Stage::kRowW / 2), row);
#pragma unroll
    for (int i = 0; i < Stage::kStepK / 64; ++i)
      tma_load(stage + i * Stage::kBoxX, maps.x, filled, step * Stage::kStepK + i * 64, token);
  }
}

// Writes the scales of a block's steps to the stages, beside x and W. Each of 64 threads has two rows of W. It loads the scales
// of several steps at once, so that not every step waits for memory.
template <typename Stage, int kGroup, typename F, typename T, int kStages>
__device__ inline void load_scales(const Product<F, T>& p, uint8_t* stages, uint64_t* full, uint64_t* empty,
                                   Ring<kStages>& ring, int row, Place place) {
  constexpr int kRowsEach = kRowsOfW / (32 * kScaleWarps);
  const int thread = threadIdx.x % (32 * kScaleWarps), groups = p.k / kGroup;
#pragma unroll 1
  for (int first = place.begin; first < place.end; first += kAheadOfScales) {
    T scales[kAheadOfScales][Stage::kGroups][kRowsEach], zeros[kAheadOfScales][Stage::kGroups][kRowsEach];
#pragma unroll
    for (int i = 0; i < kAheadOfScales; ++i)
#pragma unroll
      for (int g = 0; g < Stage::kGroups; ++g)
#pragma unroll
        for (int r = 0; r < kRowsEach; ++r) {
          const int group = (first + i) * Stage::kStepK / kGroup + g;
          const int64_t at = int64_t(min(row + r * 32 * kScaleWarps + thread, p.n - 1)) * groups + group;
          const bool there = group < groups;  // beyond k, x is 0; the weights must be finite, so they are 0, too
          scales[i][g][r] = there ? p.weights.scales[at] : T(0.0f), zeros[i][g][r] = there ? p.weights.zeros[at] : T(0.0f);
        }
#pragma unroll
    for (int i = 0; i < kAheadOfScales; ++i) {
      if (first + i >= place.end) break;
      barrier_wait(empty + ring.stage, ring.parity ^ 1);
      GroupScale* to = reinterpret_cast<GroupScale*>(stages + ring.stage * Stage::kBytes + Stage::kX + Stage::kW);
#pragma unroll
      for (int g = 0; g < Stage::kGroups; ++g)
#pragma unroll
        for (int r = 0; r < kRowsEach; ++r)
          to[g * kRowsOfW + r * 32 * kScaleWarps + thread] = group_scale(scales[i][g][r], zeros[i][g][r]);
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(full + ring.stage);
      ring.advance();
    }
  }
}

// Accumulates a block's steps of a tile. While the products of 16 in k run, the next 16 are unpacked. Their words were read
// from shared memory one part of a stage earlier.
template <typename Stage, typename T, int kTokens, int kStages>
__device__ inline void multiply_tile(SwappedTile<T, kTokens>& tile, const uint8_t* stages, uint64_t* full, uint64_t* empty,
                                     Ring<kStages>& ring, Place place) {
  static_assert(Stage::kParts == 2);
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage);
  };
  Packed<T, Stage> packed[2];
  barrier_wait(full + ring.stage, ring.parity);
  packed[0].load(stages + ring.stage * Stage::kBytes, 0);
  int before = 0;
#pragma unroll 1
  for (int step = place.begin; step < place.end; ++step) {
    const int now = ring.stage;
    const uint8_t* stage = stages + now * Stage::kBytes;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (part == 0) {
        packed[1].load(stage, 1);
      } else {
        ring.advance();
        if (step + 1 < place.end) {
          barrier_wait(full + ring.stage, ring.parity);
          packed[0].load(stages + ring.stage * Stage::kBytes, 0);
        }
      }
      uint32_t fragments[Stage::kProducts][4];
#pragma unroll
      for (int i = 0; i < Stage::kProducts; ++i) {
        packed[part].unpack(fragments[i], i);
        const int k = part * Stage::kPartK + i * 16;
        const uint64_t tokens = tile_descriptor(stage + k / 64 * Stage::kBoxX, 16, 1024) + k % 64 / 8;
        wgmma_fence();
        wgmma_registers_wide<T, false>(tile.sums[0], fragments[i], tokens, step > place.begin || part > 0 || i > 0);  //@ first
        wgmma_commit();
      }
      wgmma_wait<Stage::kProducts>();
      if (part == 0 && step > place.begin) release(before);  // all products of the stage before have ended
    }
    before = now;
  }
  wgmma_finish(tile.sums);
  release(before);
}

template <int kTokens, typename F, typename T>
__global__ void __launch_bounds__(kThreads, 1)
    multiply(const __grid_constant__ Int4Maps maps, Product<F, T> p, Int4Grid grid) {
  using Shared = Int4Shared<T, F::kBlock, kTokens>;
  using Stage = typename Shared::Stage;
  constexpr int kStages = Shared::kStages;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* boxes = reinterpret_cast<T*>(shared + kStages * Stage::kBytes);
  uint64_t *full = reinterpret_cast<uint64_t*>(shared + kStages * Stage::kBytes + Shared::kOut), *empty = full + kStages;
  if (threadIdx.x == kThreads - 32) tma_prefetch(maps.x), tma_prefetch(maps.w), tma_prefetch(maps.y);
  if (threadIdx.x == 0)
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(full + stage, 1 + kScaleWarps), barrier_init(empty + stage, kConsumers * 4);
  barrier_init_fence();
  __syncthreads();

  const Place place(grid);
  const int stride = gridDim.x / grid.splits, tiles = grid.tiles_x * grid.tiles_w;
  Ring<kStages> ring;
  // Calls work(row, token) for each of this block's tiles.
  const auto for_tiles = [&](auto work) {
#pragma unroll 1
    for (int tile = blockIdx.x / grid.splits; tile < tiles; tile += stride) {
      const int2 origin = grouped(kTileGroup, tile, grid.tiles_x, grid.tiles_w);
      work(origin.y * kRowsOfW, origin.x * kTokens);
    }
  };
  if (warpgroup_index() == kConsumers) {
    registers_down<56>();
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 3 && threadIdx.x % 32 == 0)
      for_tiles([&](int row, int token) { load_steps<Stage>(maps, shared, full, empty, ring, row, token, place); });
    if (warp < kScaleWarps)
      for_tiles([&](int row, int) { load_scales<Stage, F::kBlock>(p, shared, full, empty, ring, row, place); });
    if (grid.splits > 1) cluster_sync();
  } else {
    registers_up<224>();
    SwappedTile<T, kTokens> tile;
    for_tiles([&](int row, int token) {
      multiply_tile<Stage>(tile, shared, full, empty, ring, place);
      if (grid.splits > 1) tile.add_up(shared, grid.splits, place.split);
      tile.store(maps.y, boxes, row, token, p.m, grid.splits, place.split);
    });
    if (threadIdx.x % 128 == 0) tma_store_wait<0>();
  }
  if (grid.splits > 1) cluster_sync();  // no block exits while another may still read its sums
}

// The width of a tile, and how many blocks share its k.
struct Int4Choice {
  int tokens, splits;

  // About how many nanoseconds a launch takes. Fitted to cold times of 105 products, with all widths and splits, on an H100. At
  // these, the chosen width and splits take 0.4 % more than the fastest in the mean, and 10 % at most. An H100 runs fewer
  // clusters of 4 and 8 blocks at once than its number of multiprocessors allows.
  double nanoseconds(int m, int n, int k) const {
    const int step = tokens <= 128 ? 128 : 64, of_16 = ceil_div(ceil_div(k, step), splits) * (step / 16);
    const int64_t tiles = int64_t(ceil_div(n, kRowsOfW)) * ceil_div(m, tokens);
    const int at_once = std::max(1, (splits < 4 ? multiprocessors() : multiprocessors() * 10 / 11) / splits);
    const double product = std::max(68 + 0.35 * tokens, 0.65 * tokens);  // 16 in k, of both warpgroups
    const double sums = splits > 1 ? 3850 + 6.7 * tokens : 0;
    return double((tiles + at_once - 1) / at_once) * (of_16 * product + 76 + 11.1 * tokens + sums);
  }
};

inline Int4Choice choose(int m, int n, int k) {
  Int4Choice best{};
  double least = HUGE_VAL;
  for (const int tokens : {64, 96, 128, 160, 192, 224, 256})
    for (const int splits : {1, 2, 4, 8}) {
      const Int4Choice choice{tokens, splits};
      if (splits > ceil_div(k, 128)) continue;
      if (const double time = choice.nanoseconds(m, n, k); time < least) least = time, best = choice;
    }
  return best;
}

template <int kTokens, typename F, typename T>
void launch_tokens(const Product<F, T>& p, int splits) {
  using Shared = Int4Shared<T, F::kBlock, kTokens>;
  using Stage = typename Shared::Stage;
  Int4Maps maps;
  const T* packed = reinterpret_cast<const T*>(p.weights.w);  // four weights to an element of 16 bits
  STD_TORCH_CHECK(make_tensor_map(maps.x, p.x, p.m, p.k, p.k, kTokens, 64) &&
                      make_tensor_map(maps.w, packed, p.n, p.k / 4, p.k / 4, kRowsOfW, Stage::kRowW / 2, Stage::kRowW) &&
                      make_tensor_map(maps.y, p.y, p.m, p.n, p.n, kBoxTokens, 64),
                  "quant_gemm: the driver knows no tensor map for x, w or y; it must be one of CUDA 12 or newer");
  const Int4Grid grid{ceil_div(p.m, kTokens), ceil_div(p.n, kRowsOfW), ceil_div(p.k, Stage::kStepK), splits};
  const int64_t tiles = int64_t(grid.tiles_x) * grid.tiles_w;
  STD_TORCH_CHECK(tiles <= INT_MAX / 16, "quant_gemm: y has more tiles than a launch has blocks");
  // Where k is shared, a cluster has one tile only, because its sums overwrite its stages.
  const int blocks = splits > 1 ? int(tiles) * splits : int(std::min<int64_t>(tiles, multiprocessors()));
  allow_shared(multiply<kTokens, F, T>, Shared::kBytes);
  STD_CUDA_CHECK(
      launch_clusters(multiply<kTokens, F, T>, splits, blocks, kThreads, Shared::kBytes, p.stream, maps, p, grid));
}

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  if constexpr (kIsInt4<F>) {
    STD_TORCH_CHECK(p.n % 8 == 0, "quant_gemm: w must have a multiple of 8 rows for this kernel, got ", p.n);
    check_pieces(p.weights.w, p.k / 2, p.k / 2, "quant_gemm: w");
    check_pieces(p.x, p.k, p.k, "quant_gemm: x");
    check_pieces(p.y, p.n, p.n, "quant_gemm: y");
    const auto [tokens, splits] = choose(p.m, p.n, p.k);
    switch (tokens) {
      case 64: return launch_tokens<64>(p, splits);
      case 96: return launch_tokens<96>(p, splits);
      case 128: return launch_tokens<128>(p, splits);
      case 160: return launch_tokens<160>(p, splits);
      case 192: return launch_tokens<192>(p, splits);
      case 224: return launch_tokens<224>(p, splits);
      default: return launch_tokens<256>(p, splits);
    }
  } else {
    STD_TORCH_CHECK(false, "quant_gemm: w must be int4 for this kernel");
  }
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v09_int4_wgmma, true, false, minfer::launch)
