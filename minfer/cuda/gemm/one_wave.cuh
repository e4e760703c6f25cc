// Kernels made for one wave, as hgemm's v14_small: a block for each tile of the product. One thread of a
// block copies, and one or two warpgroups multiply. Bandwidth is bytes in flight over latency, so the stages take all of
// shared memory, and the epilogue reuses theirs.
#pragma once

#include "cuda/gemm/promoted.cuh"
#include "cuda/gemm/warpgroup_tile.cuh"
#include "cuda/scopes.cuh"

namespace minfer {

// What `Scopes` timestamps. In a step: the producer issues copies (kIssue), a consumer warp waits for them (kLoad), and
// multiplies until the previous step's products end (kProduct; not with kPromoted). In a tile: all after its products
// (kEpilogue).
enum OneWaveScope { kIssue, kLoad, kProduct, kEpilogue };

// Tiles of kM rows and kN columns. Two warpgroups have half of the rows each, or half of the columns if there are only 64
// rows. kCluster blocks below each other share their copies of B. kPerSM blocks run on one SM. kEarly: copies start before the
// block's first barrier, only with kCluster 1. The product has type Out. kPromoted: sums of the tensor cores are added up in
// registers after each step.
template <typename T_, Layout kLayout_, int kM_, int kN_, int kWarpgroups_ = 1, int kCluster_ = 1, int kPerSM_ = 1,
          bool kEarly_ = false, typename Out_ = void, bool kPromoted_ = false>
struct Shape {
  using T = T_;
  using Out = std::conditional_t<std::is_void_v<Out_>, T, Out_>;
  static constexpr Layout kLayout = kLayout_;
  static constexpr int kM = kM_, kN = kN_, kWarpgroups = kWarpgroups_, kCluster = kCluster_, kPerSM = kPerSM_;
  static constexpr bool kEarly = kEarly_, kPromoted = kPromoted_, kEven = false;
  static constexpr int kThreads = kWarpgroups * 128 + 32;
  static constexpr int kDown = kM / 64, kAcross = kWarpgroups / kDown;  // warpgroups
  static_assert(kWarpgroups == kDown * kAcross && !(kEarly && kCluster > 1));

  using Tiles = Stage<T, kLayout, kM, kN>;
  using Tile = WarpgroupTile<Out, kLayout, 64, kN / kAcross, T>;
  static constexpr int kStage = Tiles::kBytes + 2 * sizeof(uint64_t);
  static constexpr int kStages = ((228 << 10) / kPerSM - 1024) / kStage, kBytes = kStages * kStage;

  // The rows of a box of A: no more than A has, because TMA takes longer for rows outside of the matrix, which it fills with
  // zeros. The stage's other rows keep what they held; the rows of the product made of them are not stored.
  __host__ __device__ static int rows(int m) { return kCluster > 1 || m > kM ? kM : m; }
};

// The same with tiles of one height: the rows of A are divided evenly among as many tiles as before, so that the last one has few
// rows outside of the matrix. The height is a multiple of 16, which is what a warp stores.
template <typename Of>
struct Even : Of {
  static constexpr bool kEven = true;
  __host__ __device__ static int rows(int m) {
    const int tiles = ceil_div(m, Of::kM * Of::kCluster) * Of::kCluster;
    return ceil_div(m, tiles * 16) * 16;
  }
};

// What a thread does with its sums before they are stored. The constructor runs before the products, so that what it reads
// has arrived when they end. Other problems, which derive from Gemm, specialise this template.
template <typename Tile, typename Problem>
struct Epilogue {
  __device__ Epilogue(const Problem&, int /*col0*/) {}
  __device__ void operator()(Tile& tile, const Problem& g, int row0, int col0) const { tile.scale(g, row0, col0); }
};

template <typename Shape, typename Problem>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kPerSM)
    multiply(const __grid_constant__ Maps maps, Problem g) {
  using T = typename Shape::T;
  using Tiles = typename Shape::Tiles;
  using Tile = typename Shape::Tile;
  constexpr int kStages = Shape::kStages, kCluster = Shape::kCluster, kProducer = Shape::kWarpgroups * 128;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);
  uint64_t* full = reinterpret_cast<uint64_t*>(stages + kStages * Tiles::kElements);
  uint64_t* empty = full + kStages;  // of all blocks whose copies come here
  const int high = Shape::kEven ? Shape::rows(g.m) : Shape::kM;  // rows from one tile to the next
  const int row0 = blockIdx.x * high, col0 = blockIdx.y * Shape::kN;
  const int steps = (g.k + kBlockK - 1) / kBlockK;

  Scopes<Problem> scopes(g);
  Ring<kStages> ring;
  const auto load = [&](int step) {
    scopes.begin();
    T* stage = stages + ring.stage * Tiles::kElements;
    if constexpr (kCluster > 1)
      Tiles::template load_shared<kCluster>(stage, maps, full + ring.stage, row0, col0, step * kBlockK,
                                            blockIdx.x % kCluster, high);  //@ even_copied
    else
      Tiles::load(stage, maps, full + ring.stage, row0, col0, step * kBlockK, Shape::rows(g.m));  //@ rows_copied
    scopes.end(kIssue);
    ring.advance();
  };
  const int early = Shape::kEarly ? min(kStages, steps) : 0;
  if (threadIdx.x == 0) tma_prefetch(maps.a), tma_prefetch(maps.b), tma_prefetch(maps.c);
  if (threadIdx.x == kProducer) {
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(full + stage, 1), barrier_init(empty + stage, kCluster * Shape::kWarpgroups * 4);
    barrier_init_fence();
#pragma unroll 1  // a cold kernel waits for each of its instructions to come from memory
    for (int step = 0; step < early; ++step) load(step);
  }
  kCluster > 1 ? cluster_sync_relaxed() : __syncthreads();  //@ barriers_there

  if (threadIdx.x >= kProducer) {
    if (threadIdx.x == kProducer)
#pragma unroll 1
      for (int step = early; step < steps; ++step) {
        barrier_wait(empty + ring.stage, ring.parity ^ 1);
        load(step);
      }
  } else {
    const auto release = [&](int stage) {  // to the producers of all blocks
      if constexpr (kCluster > 1) {
        if (threadIdx.x % 32 < kCluster) barrier_arrive_at(empty + stage, threadIdx.x % 32);
      } else {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage);
      }
    };
    const int warpgroup = Shape::kWarpgroups > 1 ? warpgroup_index() : 0;
    const int row = warpgroup / Shape::kAcross * 64, col = warpgroup % Shape::kAcross * (Shape::kN / Shape::kAcross);
    const Epilogue<Tile, Problem> epilogue(g, col0 + col);  //@ col_of_tile
    Tile tile;
    if constexpr (Shape::kPromoted)
#pragma unroll
      for (float& sum : tile.sums[0]) sum = 0.0f;
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const T* stage = stages + ring.stage * Tiles::kElements;
      scopes.begin();
      barrier_wait(full + ring.stage, ring.parity);
      scopes.end(kLoad);
      scopes.begin();
      const T *a = stage + row * kBlockK, *b = stage + Tiles::kA + col * kBlockK;  //@ columns
      if constexpr (Shape::kPromoted) {
        add_products<(Tile::kRegisters > 64 ? 2 : 1)>(tile.sums[0], a, b);
        release(ring.stage);
      } else {
        tile.multiply(a, b, step == 0);
        wgmma_wait<1>();
        scopes.end(kProduct);
        if (step > 0) release(before);  //@ release
        before = ring.stage;
      }
    }
    scopes.begin();
    wgmma_finish(tile.sums);
    epilogue(tile, g, row0 + row, col0 + col);
    warps_sync<kProducer>();  // all stages are read, and no more copies to them are in flight  //@ stages_read
    auto* boxes = reinterpret_cast<typename Shape::Out*>(shared) + warpgroup * Tile::kAllBoxes * 4 * Tile::kBox;  //@ boxes
    if (!Shape::kEven || row + threadIdx.x / 32 % 4 * 16 < high)  // rows below are the next tile's  //@ even_stored
      tile.template store_boxes<Tile::kAllBoxes>(maps, boxes, row0 + row, col0 + col);
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
    scopes.end(kEpilogue);
  }
  if constexpr (kCluster > 1) cluster_sync_relaxed();  // no block ends while another arrives at its barriers
}

template <typename Shape, typename Problem>
void launch_shape(const Problem& g) {
  const int down = ceil_div(g.m, Shape::kM * Shape::kCluster) * Shape::kCluster, across = ceil_div(g.n, Shape::kN);
  STD_TORCH_CHECK(across <= 65535, "gemm: this kernel takes n up to ", 65535 * Shape::kN, ", got ", g.n);
  allow_shared(multiply<Shape, Problem>, Shape::kBytes);
  const Maps maps = make_maps(g, Shape::rows(g.m), Shape::kN / Shape::kCluster, Shape::Tile::kBoxN);
  STD_CUDA_CHECK(launch_clusters(multiply<Shape, Problem>, Shape::kCluster, dim3(down, across), Shape::kThreads,
                                 Shape::kBytes, g.stream, maps, g));
}

// Whether all tiles of rows x cols run at once, one on each SM.
template <typename T>
bool one_wave(const Gemm<T>& g, int rows, int cols) {
  return int64_t(ceil_div(g.m, rows)) * ceil_div(g.n, cols) <= multiprocessors();
}

}  // namespace minfer
