// v23_mma_fitted: mma.sync for GPUs before Hopper, with tiles of many sizes and k divided among blocks where tiles are few.
// Idea: with fp32 sums v07 has one tile, 128 x 256. On an L40S with 142 SMs, 300 x 4096 are 48 such tiles, so that two of three
// SMs have no work. v16_skinny has tiles for up to 128 rows, but none for 48 or 100. Here a model of the time chooses one of
// twelve tiles, from 16 x 64 to 256 x 128, and up to 16 parts of k (cuda/gemm/mma_choice.h). It counts waves of blocks,
// multiply-adds and bytes, with the rates of the GPU at hand; its constants are from v07's and v16's times on an H200. Tiles of
// up to 128 x 128 take half of an SM, and run in pairs: one block multiplies while the other waits for operands, or stores.
// Expected (L40S): up to 200 rows 1.1 to 1.25 x the time of reading B at 85 % of the memory's rate; 1.75 x over v07 at 300 x
// 4096 x 4096, and 1 x where tiles of 128 x 256 make many waves.
#include <array>

#include "cuda/gemm/mma_choice.h"
#include "hgemm.h"
#include "split_k.cuh"

namespace minfer {

template <typename Block, int kOnSM>
__global__ void __launch_bounds__(Block::kThreads, kOnSM)
    multiply_part(Gemm<typename Block::T> g, int parts, int k_each, float* partial, unsigned* counters) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto* stages = reinterpret_cast<typename Block::T*>(shared);
  const int tile = blockIdx.x / parts, part = blockIdx.x % parts;
  const int2 place = tile_of(tile, (g.m + Block::kBlockM - 1) / Block::kBlockM,
                             (g.n + Block::kBlockN - 1) / Block::kBlockN);
  const int row = place.x * Block::kBlockM, col = place.y * Block::kBlockN;
  typename Block::Warp sums;
  Block::multiply(sums, g, row, col, part * k_each, min(g.k, (part + 1) * k_each), stages);
  if (parts > 1) {
    const auto of_part = [&](int i) { return partial + (int64_t(tile) * parts + i) * kTileSums<Block>; };
    if (!add_up<Block>(sums, counters + tile, parts, of_part(part), of_part)) return;
  }
  if (g.beta != 0.0f) return sums.store(g, row + Block::warp_row(), col + Block::warp_col());
  __syncthreads();  // no warp reads fragments any more, and each has a part of shared memory to itself
  sums.store_rows(g, row + Block::warp_row(), col + Block::warp_col(),
                  stages + threadIdx.x / 32 * Block::Warp::kStaged);  //@ staged_rows
}

template <Layout kLayout, int kM, int kN, int kDeep, int kStages, int kWarpM, int kWarpN, typename T>
void launch_tile(const Gemm<T>& g, int parts) {
  using Block = BlockTile<T, float, kLayout, kM, kN, kDeep, kStages, kWarpM, kWarpN>;
  constexpr MmaTile kTile{kM, kN, kDeep, kStages, kWarpM, kWarpN};
  static_assert(kTile.threads() == Block::kThreads && kTile.bytes() == Block::kBytes);
  static_assert(Block::kThreads / 32 * Block::Warp::kStaged <= kStages * Block::kStage);
  const int64_t tiles = int64_t((g.m + kM - 1) / kM) * ((g.n + kN - 1) / kN);
  const int steps = (g.k + kDeep - 1) / kDeep, k_each = std::max(1, (steps + parts - 1) / parts) * kDeep;
  parts = std::max(1, (g.k + k_each - 1) / k_each);
  STD_TORCH_CHECK(tiles * parts <= INT_MAX, "hgemm: more output tiles than a launch has blocks");
  const auto partial = scratch_words(parts > 1 ? tiles * parts * kTileSums<Block> : 0);
  const auto kernel = multiply_part<Block, kTile.blocks_by_registers()>;
  allow_shared(kernel, Block::kBytes);
  kernel<<<dim3(tiles * parts), Block::kThreads, Block::kBytes, g.stream>>>(
      g, parts, k_each, static_cast<float*>(partial.mutable_data_ptr()), parts > 1 ? counters_of(g.stream) : nullptr);
}

#ifdef MINFER_SM
constexpr int kArch = MINFER_SM;
#else  // the emulator's
constexpr int kArch = 0;
#endif

inline MmaDevice gpu_of(int device) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
    return value;
  };
  // Clocks are in kHz, and a wire of the memory carries two bits a clock. Some virtual GPUs report 0.
  const double bytes = 2e-3 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
  const double cycles = 1e-3 * attribute(cudaDevAttrClockRate);
  return {kArch, attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
          bytes > 0 ? bytes : 1e6, cycles > 0 ? cycles : 1500};
}

// Remembered: the rates of the thread's last GPU, and choices, because a choice takes some microseconds of the host's time.
inline MmaChoice choose(int m, int n, int k) {
  struct Known {
    int m, n, k;
    MmaChoice choice;
  };
  thread_local int known_device = -1;
  thread_local MmaDevice gpu;
  thread_local std::array<Known, 64> choices;
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  if (device != known_device) known_device = device, gpu = gpu_of(device), choices = {};
  Known& known = choices[(uint64_t(m) * 31 + uint64_t(n) / 8 * 7 + uint64_t(k) / 8) % 64];
  if (known.m != m || known.n != n || known.k != k) known = {m, n, k, choose_mma(gpu, m, n, k, kMostCounters)};
  return known.choice;
}

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  const MmaChoice choice = choose(g.m, g.n, g.k);
#define MINFER_LAUNCH_IF(ROWS, COLS, ...) \
  if (choice.tile.rows == ROWS && choice.tile.cols == COLS) \
    return launch_tile<kLayout, ROWS, COLS, __VA_ARGS__>(g, choice.parts);
  MINFER_MMA_TILES(MINFER_LAUNCH_IF)
#undef MINFER_LAUNCH_IF
}

template <typename T>
void launch(const Gemm<T>& g) {
  require_vectors<T, float>(g);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v23_mma_fitted, minfer::launch)
