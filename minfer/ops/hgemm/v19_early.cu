// v19_early: up to 128 rows of A; its launch begins while the previous one still runs.
// Idea: the products of a decoder's step follow short kernels, which leave memory idle, and the first bytes of a launch come
// after some microseconds. Here blocks start as soon as those of the previous launch have all started (programmatic dependent
// launch) and SMs have room for them. Before the previous launch has ended they read nothing, or only B, if the caller says
// that B is constant (`hgemm_v19_early_constant`, for weights). Then shared memory is full of B when A is ready. If there are
// more than 16 rows, each of two neighbouring blocks copies half of A's rows to both (TMA multicast). If each block read all
// of A, the L2 would take longer for A than memory takes for B.
// Expected (H100, in a step of Llama 3.1 8B at batch 1): 3 us less for each product, so 384 us for the 4 products of 32 layers.
#include "cuda/dependent.cuh"
#include "cuda/gemm/warpgroup_tile.cuh"
#include "hgemm.h"

namespace minfer {

// A block computes kM rows and kN columns. Each of its kM / 64 warpgroups has 64 rows. kPerSM blocks run on one SM. A stage has
// room for kRows rows of A. A wgmma still multiplies 64 rows: for the others it reads whatever bytes follow, and these rows of
// the product are not stored. So shared memory has room for more stages, and holds more of B when A is ready.
template <typename T_, Layout kLayout, int kM_, int kN_, int kCluster_, int kRows_, int kPerSM_ = 1>
struct Strip {
  using T = T_;
  static constexpr int kM = kM_, kN = kN_, kCluster = kCluster_, kRows = kRows_, kPerSM = kPerSM_;
  static constexpr int kWarpgroups = kM / 64, kThreads = kWarpgroups * 128 + 32;
  using Tiles = Stage<T, kLayout, kRows, kN>;
  using Tile = WarpgroupTile<T, kLayout, 64, kN>;
  static constexpr int kStage = Tiles::kBytes + 2 * sizeof(uint64_t);
  static constexpr int kBehind = (kM - kRows) * kBlockK * sizeof(T);  // the rows that the last stage lacks
  static constexpr int kStages = ((228 << 10) / kPerSM - 1024 - kBehind) / kStage, kBytes = kStages * kStage + kBehind;

  // How many rows of A a block copies: no more than A has, but whole groups of eight if there are several blocks.
  __host__ __device__ static int part(int m) { return kCluster == 1 ? m : ((m + 7) / 8 + kCluster - 1) / kCluster * 8; }
};

template <typename Of>
__global__ void __launch_bounds__(Of::kThreads, Of::kPerSM)
    multiply_early(const __grid_constant__ Maps maps, Gemm<typename Of::T> g, bool b_is_constant) {
  using T = typename Of::T;
  using Tiles = typename Of::Tiles;
  using Tile = typename Of::Tile;
  constexpr int kStages = Of::kStages, kProducer = Of::kWarpgroups * 128, kCluster = Of::kCluster;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);
  uint64_t* full = reinterpret_cast<uint64_t*>(stages + kStages * Tiles::kElements);
  uint64_t* empty = full + kStages;  // of all blocks that copy to this one
  const int col0 = blockIdx.x * Of::kN, steps = (g.k + kBlockK - 1) / kBlockK;

  let_next_start();
  const int rank = kCluster > 1 ? cluster_rank() : 0, part = Of::part(g.m), early = min(kStages, steps);
  const auto load_b = [&](int stage, int step) {
    barrier_expect(full + stage, (kCluster * part + Of::kN) * kBlockK * int(sizeof(T)));
    Tiles::template for_boxes_of_b<Of::kN>(
        stages + stage * Tiles::kElements + Tiles::kA, col0, step * kBlockK,
        [&](T* box, int x, int y) { tma_load(box, maps.b, full + stage, x, y); });
  };
  const auto load_a = [&](int stage, int step) {
    T* to = stages + stage * Tiles::kElements + rank * part * kBlockK;
    if constexpr (kCluster > 1)
      tma_load_multicast(to, maps.a, full + stage, step * kBlockK, rank * part, (1 << kCluster) - 1);
    else
      tma_load(to, maps.a, full + stage, step * kBlockK, 0);
  };
  if (threadIdx.x == kProducer) {
    tma_prefetch(maps.a), tma_prefetch(maps.b), tma_prefetch(maps.c);
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(full + stage, 1), barrier_init(empty + stage, kCluster * Of::kWarpgroups * 4);
    barrier_init_fence();
    if (!b_is_constant) wait_for_previous();
#pragma unroll 1  // a cold kernel waits for each of its instructions to come from memory
    for (int step = 0; step < early; ++step) load_b(step, step);
  }
  kCluster > 1 ? cluster_sync_relaxed() : __syncthreads();

  if (threadIdx.x >= kProducer) {
    if (threadIdx.x == kProducer) {
      wait_for_previous();
#pragma unroll 1
      for (int step = 0; step < early; ++step) load_a(step, step);
      Ring<kStages> ring;
      ring.parity = 1;
#pragma unroll 1
      for (int step = early; step < steps; ++step, ring.advance()) {
        barrier_wait(empty + ring.stage, ring.parity ^ 1);
        load_b(ring.stage, step), load_a(ring.stage, step);
      }
    }
  } else {
    const auto release = [&](int stage) {  // to the producers of all blocks
      if constexpr (kCluster > 1) {
        if (threadIdx.x % 32 < kCluster) barrier_arrive_at(empty + stage, threadIdx.x % 32);
      } else {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage);
      }
    };
    const int row = Of::kWarpgroups > 1 ? warpgroup_index() * 64 : 0;
    Ring<kStages> ring;
    Tile tile;
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const T* stage = stages + ring.stage * Tiles::kElements;
      barrier_wait(full + ring.stage, ring.parity);
      tile.multiply(stage + row * kBlockK, stage + Tiles::kA, step == 0);
      wgmma_wait<1>();
      if (step > 0) release(before);
      before = ring.stage;
    }
    wgmma_finish(tile.sums);
    tile.scale(g, row, col0);
    warps_sync<kProducer>();  // all stages are read, and no more copies to them are in flight
    T* boxes = reinterpret_cast<T*>(shared) + row / 64 * Tile::kAllBoxes * 4 * Tile::kBox;
    tile.template store_boxes<Tile::kAllBoxes>(maps, boxes, row, col0);
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }
  if constexpr (kCluster > 1) cluster_sync_relaxed();  // no block ends while another arrives at its barriers
}

// Launches strips that all run at once, or any if `always`. Returns whether it did.
template <typename Of>
bool launch_strips(const Gemm<typename Of::T>& g, bool b_is_constant, bool always = false) {
  const auto kernel = multiply_early<Of>;
  allow_shared(kernel, Of::kBytes);
  int at_once = 0;
  STD_CUDA_CHECK(clusters_at_once(&at_once, kernel, Of::kCluster, Of::kThreads, Of::kBytes));
  const int clusters = ceil_div(g.n, Of::kN * Of::kCluster);
  if (clusters > at_once && !always) return false;
  const Maps maps = make_maps(g, Of::part(g.m), Of::kN, Of::Tile::kBoxN);
  STD_CUDA_CHECK(launch_early(kernel, Of::kCluster, dim3(clusters * Of::kCluster), Of::kThreads, Of::kBytes, g.stream, maps, g,
                              b_is_constant));
  return true;
}

// The narrowest strips that all run at once. The widest may come in several waves.
template <Layout kLayout, int kM, int kCluster, int kRows, typename T>
void launch_rows(const Gemm<T>& g, bool b_is_constant) {
  if constexpr (kLayout == Layout::TN) {
    if (launch_strips<Strip<T, kLayout, kM, 32, kCluster, kRows>>(g, b_is_constant)) return;
    if (launch_strips<Strip<T, kLayout, kM, 48, kCluster, kRows>>(g, b_is_constant)) return;
    if (launch_strips<Strip<T, kLayout, kM, 64, kCluster, kRows>>(g, b_is_constant)) return;
    if (launch_strips<Strip<T, kLayout, kM, 112, kCluster, kRows>>(g, b_is_constant)) return;
    constexpr int kWidest = kM == 64 ? 112 : 224, kPerSM = kM == 64 ? 2 : 1;
    launch_strips<Strip<T, kLayout, kM, kWidest, kCluster, kRows, kPerSM>>(g, b_is_constant, true);
  } else {  // a copy brings 64 columns
    if (launch_strips<Strip<T, kLayout, kM, 64, kCluster, kRows>>(g, b_is_constant)) return;
    launch_strips<Strip<T, kLayout, kM, 128, kCluster, kRows>>(g, b_is_constant, true);
  }
}

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g, bool b_is_constant) {
  if (g.m <= 16) return launch_rows<kLayout, 64, 1, 16>(g, b_is_constant);
  g.m <= 64 ? launch_rows<kLayout, 64, 2, 64>(g, b_is_constant) : launch_rows<kLayout, 128, 2, 128>(g, b_is_constant);
}

template <typename T>
void launch_with(const Gemm<T>& g, bool b_is_constant) {
  STD_TORCH_CHECK(g.m <= 128, "hgemm: this kernel takes m up to 128, got ", g.m);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g, b_is_constant) : launch_layout<Layout::NN>(g, b_is_constant);
}

template <typename T>
void launch(const Gemm<T>& g) {
  launch_with(g, false);
}

// For a b that no launch before this one writes, unless all launches that did have ended.
template <typename T>
void launch_constant(const Gemm<T>& g) {
  launch_with(g, true);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v19_early, minfer::launch)
MINFER_HGEMM(hgemm_v19_early_constant, minfer::launch_constant)
