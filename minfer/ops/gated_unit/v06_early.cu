// v06_early: v05_one_wave with launches that begin while the previous one still runs.
// Idea: as in hgemm's v19_early. Blocks start as soon as those of the previous launch have all started (programmatic dependent
// launch) and SMs have room for them. Before the previous launch has ended they read nothing, or only the weights, if the
// caller says that these are constant (`gated_unit_v06_early_constant`).
// Expected (H100, in a step of Llama 3.1 8B): 3 us less than v05 for each layer.
#include "cuda/dependent.cuh"
#include "cuda/gemm/one_wave.cuh"
#include "hopper_tile.cuh"

namespace minfer {

// A block computes kM rows and kN columns of y. Each warpgroup has 64 of the rows.
template <typename T, Layout kLayout, int kM, int kN>
using Strip = Shape<T, kLayout, kM, 2 * kN, kM / 64>;

template <typename Strip>
__global__ void __launch_bounds__(Strip::kThreads, 1)
    multiply_early(const __grid_constant__ GatedMaps maps, Gated<typename Strip::T> g, bool constant) {
  using T = typename Strip::T;
  constexpr int kStages = Strip::kStages, kProducer = Strip::kWarpgroups * 128, kN = Strip::kN / 2;
  using Tiles = GatedStage<T, Strip::kLayout, Strip::kM, kN>;
  using Tile = GatedTile<T, Strip::kLayout, kN>;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);
  uint64_t* full = reinterpret_cast<uint64_t*>(stages + kStages * Tiles::kElements);
  uint64_t* empty = full + kStages;
  const int row0 = blockIdx.y * Strip::kM, col0 = blockIdx.x * kN, steps = (g.k + kBlockK - 1) / kBlockK;

  let_next_start();
  Ring<kStages> ring;
  const auto load_weights = [&](int stage, int step) {
    T* to = stages + stage * Tiles::kElements + Tiles::kA;
    barrier_expect(full + stage, Tiles::kBytes - (Strip::kM - Strip::rows(g.m)) * kBlockK * int(sizeof(T)));
    Tiles::load_weight(to, maps.b, full + stage, col0, step * kBlockK);
    Tiles::load_weight(to + Tiles::kW, maps.w2, full + stage, col0, step * kBlockK);
  };
  const auto load_x = [&](int stage, int step) {
    tma_load(stages + stage * Tiles::kElements, maps.a, full + stage, step * kBlockK, row0);
  };
  const int early = min(kStages, steps);
  if (threadIdx.x == 0) tma_prefetch(maps.a), tma_prefetch(maps.b), tma_prefetch(maps.w2), tma_prefetch(maps.c);
  if (threadIdx.x == kProducer) {
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(full + stage, 1), barrier_init(empty + stage, Strip::kWarpgroups * 4);
    barrier_init_fence();
    if (!constant) wait_for_previous();
#pragma unroll 1  // a cold kernel waits for each of its instructions to come from memory
    for (int step = 0; step < early; ++step) load_weights(step, step);
  }
  __syncthreads();

  if (threadIdx.x >= kProducer) {
    if (threadIdx.x == kProducer) {
      wait_for_previous();
#pragma unroll 1
      for (int step = 0; step < early; ++step, ring.advance()) load_x(step, step);
#pragma unroll 1
      for (int step = early; step < steps; ++step, ring.advance()) {
        barrier_wait(empty + ring.stage, ring.parity ^ 1);
        load_weights(ring.stage, step), load_x(ring.stage, step);
      }
    }
    return;
  }
  const int warpgroup = Strip::kWarpgroups > 1 ? warpgroup_index() : 0;
  if (!constant) wait_for_previous();  // biases
  typename Tile::Both both;
  const auto start = [&](int stage, int step) {
    const T* a = stages + stage * Tiles::kElements;
    both.multiply(a + warpgroup * 64 * kBlockK, a + Tiles::kA, step == 0);
  };
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage);
  };
  multiply_steps(ring, full, 0, steps, start, [](int) {}, release);
  wgmma_finish(both.sums);
  typename Tile::Y y;
  Tile::finish(y, both, typename Tile::Biases(g, col0), g.silu);
  warps_sync<kProducer>();  // all stages are read, and nothing more is on its way to them
  y.template store_boxes<Tile::Y::kAllBoxes>(maps, stages + warpgroup * Tile::Y::kAllBoxes * 4 * Tile::Y::kBox,
                                             row0 + warpgroup * 64, col0);
  if (threadIdx.x % 32 == 0) tma_store_wait<0>();
}

template <int kM, int kN, Layout kLayout, typename T>
void launch_strips(const Gated<T>& g, bool constant) {
  using S = Strip<T, kLayout, kM, kN>;
  allow_shared(multiply_early<S>, S::kBytes);
  const GatedMaps maps = make_gated_maps(g, S::rows(g.m), kN, GatedTile<T, kLayout, kN>::Y::kBoxN);
  const dim3 blocks(ceil_div(g.n, kN), ceil_div(g.m, kM));
  STD_CUDA_CHECK(launch_early(multiply_early<S>, 1, blocks, S::kThreads, S::kBytes, g.stream, maps, g, constant));
}

// The narrowest strips that all run at once. The widest may come in several waves.
template <int kM, Layout kLayout, typename T>
void launch_rows(const Gated<T>& g, bool constant) {
  if constexpr (kLayout == Layout::TN) {
    if (one_wave(g, kM, 32)) return launch_strips<kM, 32, kLayout>(g, constant);
    if (one_wave(g, kM, 64)) return launch_strips<kM, 64, kLayout>(g, constant);
    if (one_wave(g, kM, 96)) return launch_strips<kM, 96, kLayout>(g, constant);
    launch_strips<kM, 112, kLayout>(g, constant);
  } else {  // a copy brings 64 columns
    if constexpr (kM == 64)  // for 128 rows and columns, two warpgroups lack registers for the sums and the biases
      if (!one_wave(g, kM, 64)) return launch_strips<kM, 128, kLayout>(g, constant);
    launch_strips<kM, 64, kLayout>(g, constant);
  }
}

template <Layout kLayout, typename T>
void launch_layout(const Gated<T>& g, bool constant) {
  g.m <= 64 ? launch_rows<64, kLayout>(g, constant) : launch_rows<128, kLayout>(g, constant);
}

template <typename T>
void launch_with(const Gated<T>& g, bool constant) {
  STD_TORCH_CHECK(g.m <= 1024, "gated_unit: this kernel takes m up to 1024, got ", g.m);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g, constant) : launch_layout<Layout::NN>(g, constant);
}

template <typename T>
void launch(const Gated<T>& g) {
  launch_with(g, false);
}

// For weights and biases that no launch before this one writes, unless all launches that did have ended.
template <typename T>
void launch_constant(const Gated<T>& g) {
  launch_with(g, true);
}

}  // namespace minfer

MINFER_GATED_UNIT(gated_unit_v06_early, minfer::launch)
MINFER_GATED_UNIT(gated_unit_v06_early_constant, minfer::launch_constant)
