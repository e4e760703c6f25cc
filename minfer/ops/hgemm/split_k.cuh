// Output tiles whose sum over k several blocks share, so that few tiles occupy all SMs. No block waits: each leaves its partial
// sums in memory, and the block that arrives last adds them up, always in the order of k, so the result has the same bits in
// every run. A second launch would cost its start-up time, and sm_89 has no clusters.
#pragma once

#include "cuda/counters.cuh"
#include "cuda/gemm/block_tile.cuh"

namespace minfer {

// The sums of a tile, as its block's threads hold them: 16 bytes of each thread, one thread after the other.
template <typename Block>
constexpr int kTileSums = Block::kBlockM * Block::kBlockN;

// Adds up what `count` blocks have of one tile, of which this is one: its sums go to `mine`, and those of all are at
// part(0), ..., part(count - 1). True for the block that arrives last, whose `sums` are then complete.
template <typename Block, typename Part>
__device__ bool add_up(typename Block::Warp& sums, unsigned* arrived, int count, float* mine, Part part) {
  constexpr int kPieces = sizeof(sums.sums) / sizeof(float4);
  static_assert(kPieces * 4 * Block::kThreads == kTileSums<Block>, "sums in fp32");
  float4* pieces = reinterpret_cast<float4*>(&sums.sums);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) reinterpret_cast<float4*>(mine)[i * Block::kThreads + threadIdx.x] = pieces[i];
  __threadfence();
  __syncthreads();  // all threads have written before one reports it
  __shared__ bool last;
  if (threadIdx.x == 0) last = atomicInc(arrived, count - 1) == count - 1;  //@ last_block
  __syncthreads();
  if (!last) return false;
  __threadfence();
#pragma unroll
  for (int i = 0; i < kPieces; ++i) pieces[i] = float4{};
  for (int block = 0; block < count; ++block) {
    const float4* theirs = reinterpret_cast<const float4*>(part(block));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float4 piece = __ldcg(theirs + i * Block::kThreads + threadIdx.x);  // from L2, where they left it
      pieces[i].x += piece.x, pieces[i].y += piece.y, pieces[i].z += piece.z, pieces[i].w += piece.w;
    }
  }
  return true;
}

// Each tile by `splits` blocks, each for as many steps in k.
template <typename Block, Layout kLayout>
__global__ void __launch_bounds__(Block::kThreads, Block::kBlocksPerSM)
    split_k(Gemm<typename Block::T> g, int splits, int k_each, float* parts, unsigned* counters) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int tile = blockIdx.x / splits, split = blockIdx.x % splits;
  const int2 place = tile_of(tile, (g.m + Block::kBlockM - 1) / Block::kBlockM,
                             (g.n + Block::kBlockN - 1) / Block::kBlockN);
  const int row0 = place.x * Block::kBlockM, col0 = place.y * Block::kBlockN;
  typename Block::Warp sums;
  Block::multiply(sums, g, row0, col0, split * k_each, min(g.k, (split + 1) * k_each),
                  reinterpret_cast<typename Block::T*>(shared));
  if (splits > 1) {
    const auto part = [&](int i) { return parts + (int64_t(tile) * splits + i) * kTileSums<Block>; };
    if (!add_up<Block>(sums, counters + tile, splits, part(split), part)) return;
  }
  sums.store(g, row0 + Block::warp_row(), col0 + Block::warp_col());
}

// Splits k into as many parts as run at once, kBlocksPerSM blocks on each SM. A part has at least four steps of kBlockK, and
// there are at most `most_splits(steps)` parts.
template <typename Block, Layout kLayout, typename T, typename MostSplits>
void launch_split_k(const Gemm<T>& g, MostSplits most_splits) {
  const int64_t tiles =
      int64_t((g.m + Block::kBlockM - 1) / Block::kBlockM) * ((g.n + Block::kBlockN - 1) / Block::kBlockN);
  const int k_tiles = (g.k + Block::kBlockK - 1) / Block::kBlockK;
  const int64_t wanted = tiles > kMostCounters ? 1 : Block::kBlocksPerSM * multiprocessors() / tiles;
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(wanted, std::min(k_tiles / 4, most_splits(k_tiles))));
  const int k_each = std::max(1, int((k_tiles + most - 1) / most)) * Block::kBlockK;
  const int splits = std::max(1, (g.k + k_each - 1) / k_each);
  STD_TORCH_CHECK(tiles * splits <= INT_MAX, "hgemm: more output tiles than a launch has blocks");
  const auto parts = scratch_words(splits > 1 ? tiles * splits * kTileSums<Block> : 0);
  allow_shared(split_k<Block, kLayout>, Block::kBytes);
  split_k<Block, kLayout><<<dim3(tiles * splits), Block::kThreads, Block::kBytes, g.stream>>>(
      g, splits, k_each, static_cast<float*>(parts.mutable_data_ptr()),
      splits > 1 ? counters_of(g.stream) : nullptr);
}

template <typename Block, Layout kLayout, typename T>
void launch_split_k(const Gemm<T>& g) {
  launch_split_k<Block, kLayout>(g, [](int k_tiles) { return k_tiles; });
}

}  // namespace minfer
