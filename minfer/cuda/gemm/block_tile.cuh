// What one block multiplies from hgemm's v06 on: cp.async fills the stages of shared memory, swizzled, and the fragments of the
// next 16 steps in k are loaded before the current ones are multiplied.
#pragma once

#include "cuda/gemm/warp_tile.cuh"

namespace minfer {

// `Copy` is TileCopy, or a class with the same functions.
template <typename T_, typename Acc, Layout kLayout, int kBlockM_, int kBlockN_, int kBlockK_, int kStages_, int kWarpM,
          int kWarpN, template <typename, bool, int, int, int, typename> typename Copy = TileCopy>
struct BlockTile {
  using T = T_;
  using Warp = WarpTile<T, Acc, kLayout, kWarpM, kWarpN>;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = kBlockK_, kStages = kStages_;
  static constexpr int kThreads = 32 * (kBlockM / kWarpM) * (kBlockN / kWarpN);
  static constexpr int kA = kBlockM * kBlockK, kStage = kA + kBlockN * kBlockK;  // elements
  static constexpr int kBytes = kStages * kStage * sizeof(T);
  static constexpr bool kTN = kLayout == Layout::TN;
  static constexpr int kBRows = kTN ? kBlockN : kBlockK, kBCols = kTN ? kBlockK : kBlockN;
  using PlaceA = Swizzled<kBlockK>;
  using PlaceB = Swizzled<kBCols>;
  static_assert(kBytes <= kMostShared, "more than a block has");

  // Where this warp's part begins in the block's tile.
  __device__ static int warp_row() { return threadIdx.x / 32 / (kBlockN / kWarpN) * kWarpM; }
  __device__ static int warp_col() { return threadIdx.x / 32 % (kBlockN / kWarpN) * kWarpN; }

  // Adds to `sums` the product of the rows from row0 and the columns from col0 on, over k_begin <= k < k_end. Shared
  // memory is free to write when it begins; when it ends other warps may still read fragments.
  __device__ static void multiply(Warp& sums, const Gemm<T>& g, int row0, int col0, int k_begin, int k_end, T* stages) {
    const int tiles = (k_end - k_begin + kBlockK - 1) / kBlockK;
    Copy<PlaceA, false, kBlockM, kBlockK, kThreads, T> a(g.a, g.lda, row0, k_begin, g.m, k_end);
    Copy<PlaceB, !kTN, kBRows, kBCols, kThreads, T> b(g.b, g.ldb, kTN ? col0 : k_begin, kTN ? k_begin : col0, kTN ? g.n : k_end,
                                                      kTN ? k_end : g.n);
    int filled = 0, used = 0;  // the stage to fill next, and the one whose fragments are loaded next
    const auto next = [](int stage) { return stage + 1 == kStages ? 0 : stage + 1; };
    const auto copy = [&](int tile) {
      T* stage = stages + filled * kStage;
      if (tile < tiles) a.start(stage), b.start(stage + kA);
      cp_async_commit();  // an empty group too, so that the groups in flight are always as many
      filled = next(filled);
    };

    typename Warp::Fragments fragments[2];  // of the current 16 steps in k, and of the next
    const auto load = [&](int k, int into) {
      const T* stage = stages + used * kStage;
      Warp::template load<PlaceA, PlaceB>(fragments[into], stage, stage + kA, warp_row(), warp_col(), k);
    };

    for (int tile = 0; tile < kStages - 1; ++tile) copy(tile);
    cp_async_wait<kStages - 2>();
    __syncthreads();
    load(0, 0);
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int step = 0; step < kBlockK / 16; ++step) {
        const bool last = step + 1 == kBlockK / 16;
        if (last) {  // all fragments of this tile are loaded; the next tile must have arrived
          cp_async_wait<kStages - 2>();
          __syncthreads();  //@ before_refill
          used = next(used);
        }
        const int k = last ? 0 : (step + 1) * 16, now = step % 2, after = (step + 1) % 2;
        if constexpr (Warp::kParts == 1) {
          load(k, after);
          if (step == 0) copy(tile + kStages - 1);  // to the place of the tile before
          sums.multiply(fragments[now]);
        } else {
          const T* stage = stages + used * kStage;
          const int lane = threadIdx.x % 32;
          Warp::template load_a<PlaceA>(fragments[after], stage, warp_row(), k, lane);
          if (step == 0) copy(tile + kStages - 1);
#pragma unroll
          for (int part = 0; part < Warp::kParts; ++part) {  // those of b have one place
            sums.multiply(fragments[now].a, fragments[0].b, part);
            Warp::template load_b<PlaceB>(fragments[0], stage + kA, warp_col(), k, part, lane);
          }
        }
      }
    }
  }
};

constexpr int kGroup = 16;  // rows of tiles; of 128x256, with 8 columns of them, 2048x2048 of the product run together

// Which tile comes `index`th: groups of kGroup rows of tiles, column by column within a group.
__device__ inline int2 tile_of(int index, int tiles_m, int tiles_n) {
  const int group = index / (kGroup * tiles_n), within = index - group * kGroup * tiles_n;
  const int rows = min(kGroup, tiles_m - group * kGroup);
  return {group * kGroup + within % rows, within / rows};  //@ tile_order
}

}  // namespace minfer
