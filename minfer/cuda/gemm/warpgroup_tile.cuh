// What the kernels for Hopper share, from hgemm's v10 on: the stages that TMA loads into shared memory, the tile that one
// warpgroup multiplies with wgmma, and its epilogue.
#pragma once

#include "cuda/gemm/warp_tile.cuh"
#include "cuda/hopper.cuh"
#include "cuda/pipeline.cuh"

namespace minfer {

inline constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int kBlockK = 64;    // 64 elements of 16 bits are 128 bytes, the longest row that TMA can swizzle
constexpr int kSlab = 64 * 64;  // elements of 64 such rows

// TMA's tensor maps of a, b and c. Each launch encodes them anew. That takes the host a microsecond, which a queue of
// launches hides, and a cache of maps would need everything that a map contains as its key.
struct Maps {
  TensorMap a, b, c;
};

// A box of a has box_m rows, and one of b box_n columns. In NN a box of b is 64 columns wide, and has box_n rows if that is
// less than 64. A box of c is what a warp stores at once, 16 rows.
// Throws if rows are no multiples of 16 bytes, or if the driver refuses.
template <typename T>
Maps make_maps(const Gemm<T>& g, int box_m, int box_n, int box_c = 64) {
  require_vectors<T, float>(g);
  STD_TORCH_CHECK(g.k > 0, "gemm: k must not be 0");
  const bool tn = g.layout == Layout::TN;
  Maps maps;
  STD_TORCH_CHECK(make_tensor_map(maps.a, g.a, g.m, g.k, g.lda, box_m, kBlockK) &&
                      make_tensor_map(maps.b, g.b, tn ? g.n : g.k, tn ? g.k : g.n, g.ldb,
                                      tn ? box_n : std::min(box_n, kBlockK), 64) &&
                      make_tensor_map(maps.c, g.c, g.m, g.n, g.ldc, 16, box_c),
                  "gemm: the driver knows no tensor map for these operands; it must be one of CUDA 12 or newer, and "
                  "leading dimensions under 2^39");
  return maps;
}

// A stage in shared memory: 64 steps in k of kM rows of A and kN columns of B, in the 128-byte swizzle. A lies [m][k]; B
// lies [n][k] in TN, and in NN as slabs of 64 columns, [k][64] each.
template <typename T, Layout kLayout, int kM, int kN>
struct Stage {
  static constexpr bool kTN = kLayout == Layout::TN;
  static constexpr int kA = kM * kBlockK, kElements = kA + kN * kBlockK, kBytes = kElements * sizeof(T);

  // One thread starts the copies of a stage: the columns of B from `col` on, and as many rows of A, from `row` on, as a box
  // of the map has.
  __device__ static void load(T* stage, const Maps& maps, uint64_t* full, int row, int col, int k, int rows = kM) {
    barrier_expect(full, kBytes - (kM - rows) * kBlockK * sizeof(T));
    tma_load(stage, maps.a, full, k, row);
    for_boxes_of_b<kN>(stage + kA, col, k, [&](T* box, int x, int y) { tma_load(box, maps.b, full, x, y); });
  }

  // The same in a cluster whose blocks multiply the same columns of B. Each block multicasts its part of B to all of them: a
  // part of the columns, or of the steps in k where B is one slab.
  template <int kCluster>
  __device__ static void load_shared(T* stage, const Maps& maps, uint64_t* full, int row, int col, int k, int rank,
                                     int rows = kM) {
    constexpr int kPart = kN / kCluster;
    constexpr bool kSteps = !kTN && kPart < 64;
    static_assert(kTN || kPart % 64 == 0 || kN == 64);
    barrier_expect(full, kBytes - (kM - rows) * kBlockK * sizeof(T));
    tma_load(stage, maps.a, full, k, row);
    for_boxes_of_b<kSteps ? kN : kPart>(
        stage + kA + rank * kPart * kBlockK, kSteps ? col : col + rank * kPart, kSteps ? k + rank * kPart : k,
        [&](T* box, int x, int y) { tma_load_multicast(box, maps.b, full, x, y, (1 << kCluster) - 1); });  //@ multicast
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

template <typename T>
struct alignas(4) Pair {
  T x, y;
};

// A tile of kM x kN of the product, which one warpgroup accumulates in registers. Its operands are of type In.
template <typename T, Layout kLayout, int kM, int kN, typename In = T>
struct WarpgroupTile {
  static constexpr bool kTN = kLayout == Layout::TN;
  static constexpr int kRegisters = kN / 2;

  alignas(16) float sums[kM / 64][kRegisters];

  // Starts sums = a b if `first`, else sums += a b, over the 64 steps in k of a stage. `a` has this warpgroup's rows.
  __device__ void multiply(const In* a, const In* b, bool first) {
    const uint64_t rows = tile_descriptor(a, 16, 1024), cols = tile_descriptor(b, kTN ? 16 : kSlab * sizeof(In), 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step)
#pragma unroll
      for (int i = 0; i < kM / 64; ++i)  // a step is 32 bytes of a row, or 16 rows; in units of 16 bytes
        wgmma<In, !kTN>(sums[i], rows + i * (kSlab * sizeof(In) / 16) + step * 2, cols + step * (kTN ? 2 : 128),  //@ steps
                       !first || step > 0);
    wgmma_commit();
  }

  // sums = alpha sums + beta c, for the rows from row0 and the columns from col0 on. With alpha 1 and beta 0, as usual, two
  // jumps skip all of it, because a cold kernel waits for each of its instructions to come from memory.
  __device__ void scale(const Gemm<T>& g, int row0, int col0) {
    if (g.alpha != 1.0f) for_pairs(0, 0, [&](int, int, float& x, float& y) { x *= g.alpha, y *= g.alpha; });
    if (g.beta == 0.0f) return;
    for_pairs(row0, col0, [&](int row, int col, float& x, float& y) {
      if (row >= g.m || col >= g.n) return;
      const Pair<T> before = *reinterpret_cast<const Pair<T>*>(g.c + row * g.ldc + col);
      x += g.beta * float(before.x), y += g.beta * float(before.y);
    });
  }

  // Writes the sums from registers. Four lanes write 16 bytes of a row, which is half of what L2 takes at once.
  __device__ void store(const Gemm<T>& g, int row0, int col0) {
    for_pairs(row0, col0, [&](int row, int col, float& x, float& y) {
      if (row < g.m && col < g.n) *reinterpret_cast<Pair<T>*>(g.c + row * g.ldc + col) = {T(x), T(y)};
    });
  }

  // What a warp stores at once: 16 rows, and 64 columns in the 128-byte swizzle, or all that there are.
  static constexpr int kBoxN = kN % 64 == 0 ? 64 : kN, kBox = 16 * kBoxN, kAllBoxes = kM / 64 * (kN / kBoxN);

  // Box number j of the sums, rounded, two to a register.
  __device__ void pack(uint32_t (&bits)[kBoxN / 4], int j) const {
    const float* of_box = sums[j / (kN / kBoxN)] + j % (kN / kBoxN) * (kBoxN / 2);
#pragma unroll
    for (int i = 0; i < kBoxN / 4; ++i) {
      const Pair<T> pair{T(of_box[2 * i]), T(of_box[2 * i + 1])};
      memcpy(&bits[i], &pair, 4);
    }
  }

  // Writes box number j through shared memory, by TMA. Each warp stores its own boxes. The warp goes on while TMA reads the
  // box, and waits for TMA only before it writes its next box to the same shared memory.
  template <int kPending>
  __device__ static void store_box(const Maps& maps, T* box, const uint32_t (&bits)[kBoxN / 4], int j, int row0, int col0) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (lane == 0) tma_store_wait<kPending>();  //@ box_stored
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kBoxN / 16; ++n) {  // 16 columns
      const int piece = n * 2 + lane / 16;
      stmatrix_x4(box + lane % 16 * kBoxN + (kBoxN == 64 ? piece ^ lane % 8 : piece) * 8,  //@ swizzle
                  {bits[n * 4], bits[n * 4 + 1], bits[n * 4 + 2], bits[n * 4 + 3]});
    }
    fence_async();  //@ fence_box
    __syncwarp();
    if (lane == 0) {
      tma_store(maps.c, box, col0 + j % (kN / kBoxN) * kBoxN, row0 + j / (kN / kBoxN) * 64 + warp * 16);
      tma_store_commit();
    }
  }

  // Writes all boxes. Each warp has shared memory for kBoxes of them, and waits for no other warp. TMA may still read the
  // last ones when this returns: until the next call, or `tma_store_wait<0>()`.
  template <int kBoxes>
  __device__ void store_boxes(const Maps& maps, T* boxes, int row0, int col0) const {
    T* mine = boxes + threadIdx.x / 32 % 4 * kBoxes * kBox;
#pragma unroll
    for (int j = 0; j < kAllBoxes; ++j) {
      uint32_t bits[kBoxN / 4];
      pack(bits, j);
      store_box<kBoxes - 1>(maps, mine + j % kBoxes * kBox, bits, j, row0, col0);
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
};

// The mainloop of a tile in one warpgroup, over the steps begin to end. Each step waits for a stage. start(stage, step)
// starts its products, and under(step) runs while they do. release(stage) gives back the stage of the step before, whose
// products have ended. Returns the last stage, whose products may still be in flight.
template <int kStages, typename Start, typename Under, typename Release>
__device__ int multiply_steps(Ring<kStages>& ring, uint64_t* full, int begin, int end, Start start, Under under,
                              Release release) {
  int before = 0;
#pragma unroll 1  // a cold kernel waits for each of its instructions to come from memory
  for (int step = begin; step < end; ++step, ring.advance()) {
    barrier_wait(full + ring.stage, ring.parity);  //@ full_stage
    start(ring.stage, step);
    under(step);
    wgmma_wait<1>();
    if (step > begin) release(before);
    before = ring.stage;
  }
  return before;
}

// The store of a finished tile, a TMA box at a time, while the sums of the next one are accumulated.
template <typename Tile, typename T>
struct Outgoing {
  uint32_t bits[Tile::kAllBoxes][Tile::kBoxN / 4];
  int row0, col0, next = Tile::kAllBoxes;  // the box to store next

  __device__ void take(const Tile& tile, int row, int col) {
    row0 = row, col0 = col, next = 0;
#pragma unroll
    for (int j = 0; j < Tile::kAllBoxes; ++j) tile.pack(bits[j], j);
  }

  __device__ bool rests() const { return next == Tile::kAllBoxes; }

  // Stores one box, through this warp's shared memory for one box.
  __device__ void store_next(const Maps& maps, T* box) {
#pragma unroll
    for (int j = 0; j < Tile::kAllBoxes; ++j)  // registers have no index at run time
      if (j == next) Tile::template store_box<0>(maps, box, bits[j], j, row0, col0);
    ++next;
  }

  // Stores one box during a step, and all that are left during the last step, end - 1.
  __device__ void store_beside(int step, int end, const Maps& maps, T* box) {
    while (!rests()) {
      store_next(maps, box);
      if (step + 1 < end) break;
    }
  }
};

// The place of tile number `tile`. Numbers go through groups of `group` rows of tiles, column by column within a group. So
// the tiles that run at one time form a square of the product, and share its rows of A and columns of B in the L2.
__device__ inline int2 grouped(int group, int tile, int tiles_m, int tiles_n) {
  const int first = tile / (group * tiles_n) * group, within = tile - first * tiles_n;
  const int rows = min(group, tiles_m - first);
  return {first + within % rows, within / rows};
}

// The tiles of a block in a persistent grid: every `stride`-th tile of clusters, and in each the rows of block `rank`.
template <int kBlockM, int kBlockN, int kCluster, int kGroup>
struct WorkTileScheduler {
  int tiles_m, tiles_n, rank, tile, stride;

  template <typename T>
  __device__ WorkTileScheduler(const Gemm<T>& g)
      : tiles_m((g.m + kBlockM * kCluster - 1) / (kBlockM * kCluster)), tiles_n((g.n + kBlockN - 1) / kBlockN),
        rank(cluster_rank()), tile(blockIdx.x / kCluster), stride(gridDim.x / kCluster) {}
  __device__ bool goes_on() const { return tile < tiles_m * tiles_n; }
  __device__ void advance(int tiles) { tile += tiles * stride; }
  __device__ int2 origin() const { return origin_of(tile); }
  __device__ int2 origin_of(int tile) const {
    const int2 place = grouped(kGroup, tile, tiles_m, tiles_n);
    return {(place.x * kCluster + rank) * kBlockM, place.y * kBlockN};
  }
};

// How many tiles a product has, each kCluster blocks high, and how many clusters share them.
struct PersistentGrid {
  int tiles, clusters;
};

template <int kBlockM, int kBlockN, int kCluster, typename Kernel, typename T>
PersistentGrid persistent_grid(Kernel* kernel, int threads, int bytes, const Gemm<T>& g) {
  const int64_t tiles = int64_t(ceil_div(g.m, kBlockM * kCluster)) * ceil_div(g.n, kBlockN);
  STD_TORCH_CHECK(tiles <= INT_MAX / 2, "gemm: more output tiles than fit 32 bits");
  allow_shared(kernel, bytes);
  int clusters = 0;
  STD_CUDA_CHECK(clusters_at_once(&clusters, kernel, kCluster, threads, bytes));
  return {int(tiles), int(std::min<int64_t>(tiles, std::max(1, clusters)))};
}

// Launches a persistent kernel, whose blocks take their tiles from a WorkTileScheduler.
template <int kBlockM, int kBlockN, int kCluster, typename Kernel, typename T>
void launch_persistent(Kernel* kernel, int threads, int bytes, const Gemm<T>& g) {
  const Maps maps = make_maps(g, kBlockM, kBlockN / kCluster);
  const int clusters = persistent_grid<kBlockM, kBlockN, kCluster>(kernel, threads, bytes, g).clusters;
  STD_CUDA_CHECK(launch_clusters(kernel, kCluster, clusters * kCluster, threads, bytes, g.stream, maps, g));
}

}  // namespace minfer
