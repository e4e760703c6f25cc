// What the rungs for Hopper share: stages with a tile of x and one of each weight, and what becomes of the sums. The two
// weights lie beside each other in a stage, as the columns of one b: one wgmma multiplies both.
#pragma once

#include "cuda/gemm/warpgroup_tile.cuh"
#include "cuda/vector.cuh"
#include "gated_unit.h"

namespace minfer {

struct GatedMaps : Maps {  // a is x, b is W1, c is y
  TensorMap w2;
};

// Boxes of x have box_m rows, of the weights box_n columns; in NN these are 64 wide, and several. Those of y are what a warp
// stores at once, of 16 rows. Throws a sentence if rows are no multiples of 16 bytes, or the driver refuses.
template <typename T>
GatedMaps make_gated_maps(const Gated<T>& g, int box_m, int box_n, int box_y) {
  require_rows(g);
  STD_TORCH_CHECK(g.k > 0, "gated_unit: k must not be 0");
  const bool tn = g.layout == Layout::TN;
  GatedMaps maps;
  const auto weight = [&](TensorMap& map, const T* w, int64_t ld) {
    return make_tensor_map(map, w, tn ? g.n : g.k, tn ? g.k : g.n, ld, tn ? box_n : kBlockK, 64);
  };
  STD_TORCH_CHECK(make_tensor_map(maps.a, g.a, g.m, g.k, g.lda, box_m, kBlockK) && weight(maps.b, g.b, g.ldb) &&
                      weight(maps.w2, g.w2, g.ldw2) && make_tensor_map(maps.c, g.c, g.m, g.n, g.ldc, 16, box_y),
                  "gated_unit: the driver knows no tensor map for these operands; it must be one of CUDA 12 or newer, and "
                  "leading dimensions under 2^39");
  return maps;
}

// A stage in shared memory: 64 steps in k of kM rows of x, and of kN columns of W1 and of W2.
template <typename T, Layout kLayout, int kM, int kN>
struct GatedStage : Stage<T, kLayout, kM, 2 * kN> {
  using Base = Stage<T, kLayout, kM, 2 * kN>;
  static constexpr int kW = kN * kBlockK;  // elements of a weight
  static_assert(kLayout == Layout::TN ? kN % 8 == 0 : kN % 64 == 0);

  // One thread starts the copies of a weight's columns from `col` on; those of W1 go to b, those of W2 kW behind.
  __device__ static void load_weight(T* b, const TensorMap& map, uint64_t* full, int col, int k) {
    Base::template for_boxes_of_b<kN>(b, col, k, [&](T* box, int x, int y) { tma_load(box, map, full, x, y); });
  }

  // The copies of a stage: the rows of x from `row` on, as many as the map's boxes have, and both weights.
  __device__ static void load(T* stage, const GatedMaps& maps, uint64_t* full, int row, int col, int k, int rows = kM) {
    barrier_expect(full, Base::kBytes - (kM - rows) * kBlockK * sizeof(T));
    tma_load(stage, maps.a, full, k, row);
    load_weight(stage + Base::kA, maps.b, full, col, k);
    load_weight(stage + Base::kA + kW, maps.w2, full, col, k);
  }

  // The same in a cluster of two blocks below each other: each copies one of the weights to both.
  __device__ static void load_shared(T* stage, const GatedMaps& maps, uint64_t* full, int row, int col, int k, int rank) {
    barrier_expect(full, Base::kBytes);
    tma_load(stage, maps.a, full, k, row);
    const TensorMap& map = rank == 0 ? maps.b : maps.w2;  //@ weight
    Base::template for_boxes_of_b<kN>(stage + Base::kA + rank * kW, col, k, [&](T* box, int x, int y) {
      tma_load_multicast(box, map, full, x, y, 3);
    });
  }
};

// 64 x kN of y, which one warpgroup makes of a tile with twice as many columns: those of x W1, and then those of x W2.
template <typename T, Layout kLayout, int kN>
struct GatedTile {
  using Both = WarpgroupTile<T, kLayout, 64, 2 * kN>;
  using Y = WarpgroupTile<T, kLayout, 64, kN>;

  // A thread's biases, of two neighbouring columns in each 8: kept as they are in memory.
  struct Biases {
    uint32_t first[kN / 8], second[kN / 8];

    __device__ Biases(const Gated<T>& g, int col0) {
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
        const int col = col0 + j * 8 + threadIdx.x % 4 * 2;
        const bool inside = g.bias1 && col < g.n;
        first[j] = inside ? *reinterpret_cast<const uint32_t*>(g.bias1 + col) : 0;
        second[j] = inside ? *reinterpret_cast<const uint32_t*>(g.bias2 + col) : 0;
      }
    }
  };

  __device__ static void finish(Y& y, const Both& both, const Biases& biases, bool silu) {
    using Two = typename Vector<T>::Pair;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float2 one = to_floats(reinterpret_cast<const Two&>(biases.first[j]));
      const float2 other = to_floats(reinterpret_cast<const Two&>(biases.second[j]));
#pragma unroll
      for (int e = 0; e < 4; ++e)
        y.sums[0][j * 4 + e] = gated(both.sums[0][j * 4 + e] + (e % 2 ? one.y : one.x),
                                     both.sums[0][kN / 2 + j * 4 + e] + (e % 2 ? other.y : other.x), silu);
    }
  }
};

}  // namespace minfer
