// v08_stream_k: v07's tiles, one block an SM; the steps in k of the last tiles are divided evenly, across tile boundaries.
// Idea: 2048x2048 has 128 tiles for 132 SMs, 4096x4096 has 512: the last wave leaves SMs idle, and split-K helps only by whole
// factors. Here every block has the same number of steps. Where two or more blocks worked on a tile, the one that arrives
// last adds up its partial sums (split_k.cuh). Only the steps of the last wave are divided; the other tiles stay whole.
// After Osama et al., "Stream-K", PPoPP 2023.
// Expected: over v07 what its last wave leaves idle, up to 1.9x just above a full wave and 2.5x at 1024 (32 tiles), less the
// partial-sum exchange through the L2.
// Measured (H200, bfloat16, TN, float32, m=n=k=8192): 448.3 TFLOP/s cold, 413.2 steady; 57.3 % and 61.8 % of torch.
#include "hgemm.h"
#include "split_k.cuh"

namespace minfer {

template <typename T, Layout kLayout>
using Tile = BlockTile<T, float, kLayout, 128, 256, 32, 4, 64, 64>;

// How the steps of the dealt tiles go to the blocks: `each` to a block, and one more to the first `extra` of them.
struct Deal {
  int each, extra;
  __device__ int begin_of(int block) const { return block * each + min(block, extra); }
  __device__ int block_of(int step) const {
    const int long_ones = extra * (each + 1);
    return step < long_ones ? step / (each + 1) : extra + (step - long_ones) / each;
  }
};

// What a block multiplies next. It is kept in shared memory, because the sums take the registers.
struct Task {
  int next;                  // a tile below `whole`, or `whole` plus a step of the dealt ones
  int tile, k_begin, k_end;  // in tiles of k
  int first, count;          // the blocks that have steps of it

  // Begins with the block's number as `next`. False when the block has done all that is its.
  __device__ bool advance(int whole, int k_tiles, const Deal& deal) {
    if (next < whole) {
      tile = next, k_begin = 0, k_end = k_tiles, count = 1;
      next += gridDim.x;
      return true;
    }
    const int begin = deal.begin_of(blockIdx.x), end = deal.begin_of(blockIdx.x + 1);
    const int step = tile < whole ? begin : next - whole;  // of the dealt tiles, it had none yet
    if (step >= end) return false;
    const int dealt = step / k_tiles;
    tile = whole + dealt, k_begin = step - dealt * k_tiles, k_end = min(k_tiles, k_begin + end - step);  //@ step_of_tile
    first = deal.block_of(dealt * k_tiles), count = deal.block_of((dealt + 1) * k_tiles - 1) - first + 1;
    next = whole + step + k_end - k_begin;
    return true;
  }
};

// The first `whole` tiles go round the blocks one by one; the steps of the rest are dealt out.
template <typename T, Layout kLayout>
__global__ void __launch_bounds__(Tile<T, kLayout>::kThreads, 1)
    stream_k(Gemm<T> g, int whole, Deal deal, float* parts, unsigned* counters) {
  using Block = Tile<T, kLayout>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Task task;
  __shared__ bool more;
  const int k_tiles = (g.k + Block::kBlockK - 1) / Block::kBlockK;
  if (threadIdx.x == 0) task.next = blockIdx.x, task.tile = -1;
  while (true) {
    if (threadIdx.x == 0) more = task.advance(whole, k_tiles, deal);
    __syncthreads();
    if (!more) return;
    const int2 place = tile_of(task.tile, (g.m + Block::kBlockM - 1) / Block::kBlockM,
                               (g.n + Block::kBlockN - 1) / Block::kBlockN);
    typename Block::Warp sums;
    Block::multiply(sums, g, place.x * Block::kBlockM, place.y * Block::kBlockN, task.k_begin * Block::kBlockK,
                    min(g.k, task.k_end * Block::kBlockK), reinterpret_cast<T*>(shared));
    // A block has parts of two tiles at most: of the first that it is dealt, and of the last.
    const auto part = [&](int i) {
      const int block = task.first + i, second = deal.begin_of(block) / k_tiles != task.tile - whole;
      return parts + (2LL * block + second) * kTileSums<Block>;  //@ place_of_sums
    };
    if (task.count == 1 || add_up<Block>(sums, counters + (task.tile - whole), task.count,
                                         part(blockIdx.x - task.first), part)) {
      const int2 place = tile_of(task.tile, (g.m + Block::kBlockM - 1) / Block::kBlockM,
                                 (g.n + Block::kBlockN - 1) / Block::kBlockN);
      sums.store(g, place.x * Block::kBlockM + Block::warp_row(), place.y * Block::kBlockN + Block::warp_col());
    }
    __syncthreads();  // all have read their fragments and the task
  }
}

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  using Block = Tile<T, kLayout>;
  const int64_t tiles =
      int64_t((g.m + Block::kBlockM - 1) / Block::kBlockM) * ((g.n + Block::kBlockN - 1) / Block::kBlockN);
  STD_TORCH_CHECK(tiles <= INT_MAX, "hgemm: more output tiles than a launch has blocks");
  const int64_t steps = tiles * ((g.k + Block::kBlockK - 1) / Block::kBlockK);
  const int grid = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(multiprocessors(), steps / 4)));
  const int64_t waves = tiles / grid;
  const int whole = static_cast<int>(tiles % grid == 0 ? tiles : std::max<int64_t>(0, waves - 1) * grid);
  STD_TORCH_CHECK(2 * grid <= kMostCounters, "hgemm: more SMs than there are counters for");
  const int dealt = static_cast<int>((tiles - whole) * ((g.k + Block::kBlockK - 1) / Block::kBlockK));
  const auto parts = scratch_words(whole == tiles ? 0 : 2LL * grid * kTileSums<Block>);
  allow_shared(stream_k<T, kLayout>, Block::kBytes);
  stream_k<T, kLayout><<<grid, Block::kThreads, Block::kBytes, g.stream>>>(
      g, whole, Deal{dealt / grid, dealt % grid}, static_cast<float*>(parts.mutable_data_ptr()), counters_of(g.stream));
}

template <typename T>
void launch(const Gemm<T>& g) {
  require_vectors<T, float>(g);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v08_stream_k, minfer::launch)
