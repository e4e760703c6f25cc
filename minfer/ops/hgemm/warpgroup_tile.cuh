// What the rungs for Hopper share, from v10 on: the tiles that TMA brings to shared memory, what one warpgroup multiplies
// with wgmma, and its way out.
#pragma once

#include "cuda/hopper.cuh"
#include "warp_tile.cuh"

namespace minfer {

constexpr int kBlockK = 64;    // 128 bytes of 16-bit elements: what the swizzle orders, and the most that it does
constexpr int kSlab = 64 * 64;  // elements of 64 such rows

// How TMA finds a, b and c. Encoded anew for each launch: that takes a microsecond of the host's, which a queue of
// launches hides, and a cache would have to know everything that is in it.
struct Maps {
  TensorMap a, b, c;
};

// Boxes of a have box_m rows; of b box_n columns, and in NN 64 of them; those of c are what a warp stores at once.
// Throws a sentence if rows are no multiples of 16 bytes, or the driver refuses.
template <typename T>
Maps make_maps(const Gemm<T>& g, int box_m, int box_n) {
  require_vectors<T, float>(g);
  STD_TORCH_CHECK(g.k > 0, "hgemm: k must not be 0");
  const bool tn = g.layout == Layout::TN;
  Maps maps;
  STD_TORCH_CHECK(make_tensor_map(maps.a, g.a, g.m, g.k, g.lda, box_m, kBlockK) &&
                      make_tensor_map(maps.b, g.b, tn ? g.n : g.k, tn ? g.k : g.n, g.ldb, tn ? box_n : kBlockK, 64) &&
                      make_tensor_map(maps.c, g.c, g.m, g.n, g.ldc, 16, 64),
                  "hgemm: the driver knows no tensor map for these operands; it must be one of CUDA 12 or newer, and "
                  "leading dimensions under 2^39");
  return maps;
}

// Where in a ring of kStages stages a loop is, and the parity of the barrier's phase there.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) parity ^= 1, stage = 0;
  }
  __device__ void skip(int steps) {
    stage += steps;
    parity ^= stage / kStages & 1, stage %= kStages;
  }
};

// A stage in shared memory: 64 steps in k of kM rows of A and kN columns of B, in the 128-byte swizzle. A lies [m][k]; B
// lies [n][k] in TN, and in NN as slabs of 64 columns, [k][64] each.
template <typename T, Layout kLayout, int kM, int kN>
struct Stage {
  static constexpr bool kTN = kLayout == Layout::TN;
  static constexpr int kA = kM * kBlockK, kElements = kA + kN * kBlockK, kBytes = kElements * sizeof(T);

  // One thread starts the copies of a stage: the rows of A from `row` on and the columns of B from `col` on.
  __device__ static void load(T* stage, const Maps& maps, uint64_t* full, int row, int col, int k) {
    barrier_expect(full, kBytes);
    tma_load(stage, maps.a, full, k, row);
    for_boxes_of_b<kN>(stage + kA, col, k, [&](T* box, int x, int y) { tma_load(box, maps.b, full, x, y); });
  }

  // The same in a cluster whose blocks multiply one B: each copies its part of the columns to all.
  template <int kCluster>
  __device__ static void load_shared(T* stage, const Maps& maps, uint64_t* full, int row, int col, int k, int rank) {
    constexpr int kPart = kN / kCluster;
    static_assert(kPart % 64 == 0);
    barrier_expect(full, kBytes);
    tma_load(stage, maps.a, full, k, row);
    for_boxes_of_b<kPart>(
        stage + kA + rank * kPart * kBlockK, col + rank * kPart, k,
        [&](T* box, int x, int y) { tma_load_multicast(box, maps.b, full, x, y, (1 << kCluster) - 1); });
  }

  // Calls start(place, x, y) for each of the boxes that kCols columns of B are copied in.
  template <int kCols, typename Start>
  __device__ static void for_boxes_of_b(T* b, int col, int k, Start start) {
    if constexpr (kTN) {
      start(b, k, col);
    } else {
#pragma unroll
      for (int slab = 0; slab < kCols / 64; ++slab) start(b + slab * kSlab, col + slab * 64, k);
    }
  }
};

// kM x kN of the product, which one warpgroup adds up in registers.
template <typename T, Layout kLayout, int kM, int kN>
struct WarpgroupTile {
  static constexpr bool kTN = kLayout == Layout::TN;
  static constexpr int kRegisters = kN / 2;

  struct alignas(4) Pair {
    T x, y;
  };

  float sums[kM / 64][kRegisters];

  // Starts sums = a b, or += unless it is the first, over the 64 steps in k of a stage: a of this warpgroup's rows.
  __device__ void multiply(const T* a, const T* b, bool first) {
    const uint64_t rows = tile_descriptor(a, 16, 1024), cols = tile_descriptor(b, kTN ? 16 : kSlab * sizeof(T), 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step)
#pragma unroll
      for (int i = 0; i < kM / 64; ++i)  // a step is 32 bytes of a row, or 16 rows; in units of 16 bytes
        wgmma<T, !kTN>(sums[i], rows + i * (kSlab * sizeof(T) / 16) + step * 2, cols + step * (kTN ? 2 : 128),
                       !first || step > 0);
    wgmma_commit();
  }

  // sums = alpha sums + beta c, for the rows from row0 and the columns from col0 on.
  __device__ void scale(const Gemm<T>& g, int row0, int col0) {
    for_pairs(row0, col0, [&](int row, int col, float& x, float& y) {
      x *= g.alpha, y *= g.alpha;
      if (g.beta == 0.0f || row >= g.m || col >= g.n) return;
      const Pair before = *reinterpret_cast<const Pair*>(g.c + row * g.ldc + col);
      x += g.beta * float(before.x), y += g.beta * float(before.y);
    });
  }

  // Writes the sums from registers. Four lanes write 16 bytes of a row, which is half of what L2 takes at once.
  __device__ void store(const Gemm<T>& g, int row0, int col0) {
    for_pairs(row0, col0, [&](int row, int col, float& x, float& y) {
      if (row < g.m && col < g.n) *reinterpret_cast<Pair*>(g.c + row * g.ldc + col) = Pair{T(x), T(y)};
    });
  }

  static constexpr int kBox = 16 * 64;  // elements that a warp stores at once

  // The same by way of shared memory and the copy engine: each warp has kBoxes boxes there and waits for no other warp.
  // The thread goes on while the last of them are read, until the next call or `tma_store_wait<0>()`.
  template <int kBoxes>
  __device__ void store_boxes(const Maps& maps, T* boxes, int row0, int col0) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    T* mine = boxes + warp * kBoxes * kBox;
    const int place = lane % 16 * 64, piece = lane / 16;
#pragma unroll
    for (int i = 0; i < kM / 64; ++i)
#pragma unroll
      for (int j = 0; j < kN / 64; ++j) {
        T* box = mine + (i * (kN / 64) + j) % kBoxes * kBox;
        if (lane == 0) tma_store_wait<kBoxes - 1>();  // the engine has read what was in the box
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 4; ++n) {  // 16 columns
          uint32_t fragment[4];
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const float* d = sums[i] + j * 32 + n * 8 + r * 2;
            fragment[r] = pack(d[0], d[1]);
          }
          stmatrix_x4(box + place + ((n * 2 + piece) ^ lane % 8) * 8, fragment);
        }
        fence_async();
        __syncwarp();
        if (lane == 0) {
          tma_store(maps.c, box, col0 + j * 64, row0 + i * 64 + warp * 16);
          tma_store_commit();
        }
      }
  }

  // Calls f(row, col, x, y) for every two neighbours of this thread's sums.
  template <typename F>
  __device__ void for_pairs(int row0, int col0, F f) {
    const int row = row0 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, col = col0 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kM / 64; ++i)
#pragma unroll
      for (int r = 0; r < kRegisters; r += 2) f(row + i * 64 + r % 4 * 4, col + r / 4 * 8, sums[i][r], sums[i][r + 1]);
  }

 private:
  __device__ static uint32_t pack(float x, float y) {
    const Pair pair{T(x), T(y)};
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
  }
};

// c = alpha sums + beta c for four columns of a row.
template <typename T>
__device__ void store_4(const Gemm<T>& g, int row, int col, float4 sums) {
  struct alignas(8) Four {
    T x, y, z, w;
  };
  Four* c = reinterpret_cast<Four*>(g.c + row * g.ldc + col);
  sums.x *= g.alpha, sums.y *= g.alpha, sums.z *= g.alpha, sums.w *= g.alpha;
  if (g.beta != 0.0f) {
    const Four before = *c;
    sums.x += g.beta * float(before.x), sums.y += g.beta * float(before.y);
    sums.z += g.beta * float(before.z), sums.w += g.beta * float(before.w);
  }
  *c = {T(sums.x), T(sums.y), T(sums.z), T(sums.w)};
}

// Which tile has a number: groups of kGroup rows of tiles, column by column within a group, so that tiles that are
// multiplied at one time form a square of the product and share its rows of A and columns of B in the L2.
template <int kGroup>
__device__ inline int2 grouped(int tile, int tiles_m, int tiles_n) {
  const int group = tile / (kGroup * tiles_n), within = tile - group * kGroup * tiles_n;
  const int rows = min(kGroup, tiles_m - group * kGroup);
  return {group * kGroup + within % rows, within / rows};
}

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace minfer
