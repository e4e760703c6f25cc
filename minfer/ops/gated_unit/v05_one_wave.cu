// v05_one_wave: up to 1024 rows of x, in blocks of 64 or 128, as in hgemm's v17 each with as many columns as make one wave.
// Idea: few tokens are the time in which both weights come from memory. All blocks start together, stream their columns of
// both by TMA with shared memory full of copies under way, and end together; nothing is added up between blocks. At 1024, v03
// has a tile for half of the multiprocessors only, and this one 128 of 128 x (64 + 64).
// Expected: (16, 4096) x (4096, 14336): 235 MB of weights, 55 us on an H200, and 6 us for launch, first bytes and last ones.
// 1024 cubed: 14 us, because blocks share nothing and read 67 MB from the L2.
// Measured (H200, float16, sigmoid, NN, m=n=k=1024): 329.2 TFLOP/s cold; 268.1 % of torch.
#include "cuda/gemm/one_wave.cuh"
#include "hopper_tile.cuh"

namespace minfer {

// Blocks of kM rows, of which each warpgroup has 64, and kN columns of y.
template <typename T, Layout kLayout, int kM, int kN>
using Strip = Shape<T, kLayout, kM, 2 * kN, kM / 64>;

template <typename Strip>
__global__ void __launch_bounds__(Strip::kThreads, 1)
    multiply_strip(const __grid_constant__ GatedMaps maps, Gated<typename Strip::T> g) {
  using T = typename Strip::T;
  constexpr int kStages = Strip::kStages, kProducer = Strip::kWarpgroups * 128, kN = Strip::kN / 2;
  using Tiles = GatedStage<T, Strip::kLayout, Strip::kM, kN>;
  using Tile = GatedTile<T, Strip::kLayout, kN>;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);
  uint64_t* full = reinterpret_cast<uint64_t*>(stages + kStages * Tiles::kElements);
  uint64_t* empty = full + kStages;
  const int row0 = blockIdx.y * Strip::kM, col0 = blockIdx.x * kN, steps = (g.k + kBlockK - 1) / kBlockK;

  Ring<kStages> ring;
  const auto load = [&](int step) {
    Tiles::load(stages + ring.stage * Tiles::kElements, maps, full + ring.stage, row0, col0, step * kBlockK,
                Strip::rows(g.m));
    ring.advance();
  };
  const int early = min(kStages, steps);  // copies that begin before the block's threads have met
  if (threadIdx.x == 0) tma_prefetch(maps.a), tma_prefetch(maps.b), tma_prefetch(maps.w2), tma_prefetch(maps.c);
  if (threadIdx.x == kProducer) {
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(full + stage, 1), barrier_init(empty + stage, Strip::kWarpgroups * 4);
    barrier_init_fence();
#pragma unroll 1  // a cold kernel waits for each of its instructions to come from memory
    for (int step = 0; step < early; ++step) load(step);
  }
  __syncthreads();

  if (threadIdx.x >= kProducer) {
    if (threadIdx.x == kProducer)
#pragma unroll 1
      for (int step = early; step < steps; ++step) {
        barrier_wait(empty + ring.stage, ring.parity ^ 1);
        load(step);
      }
    return;
  }
  const int warpgroup = Strip::kWarpgroups > 1 ? warpgroup_index() : 0;
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
void launch_strips(const Gated<T>& g) {
  using S = Strip<T, kLayout, kM, kN>;
  allow_shared(multiply_strip<S>, S::kBytes);
  const GatedMaps maps = make_gated_maps(g, S::rows(g.m), kN, GatedTile<T, kLayout, kN>::Y::kBoxN);
  const dim3 blocks(ceil_div(g.n, kN), ceil_div(g.m, kM));
  STD_CUDA_CHECK(launch_clusters(multiply_strip<S>, 1, blocks, S::kThreads, S::kBytes, g.stream, maps, g));
}

// The narrowest strips that all run at once. The widest may come in several waves.
template <int kM, Layout kLayout, typename T>
void launch_rows(const Gated<T>& g) {
  if constexpr (kLayout == Layout::TN) {
    if (one_wave(g, kM, 32)) return launch_strips<kM, 32, kLayout>(g);
    if (one_wave(g, kM, 64)) return launch_strips<kM, 64, kLayout>(g);
    if (one_wave(g, kM, 96)) return launch_strips<kM, 96, kLayout>(g);
    launch_strips<kM, 112, kLayout>(g);
  } else {  // a copy brings 64 columns
    if constexpr (kM == 64)  // of 128 rows, two warpgroups have no registers for the sums and the biases of 128 columns
      if (!one_wave(g, kM, 64)) return launch_strips<kM, 128, kLayout>(g);
    launch_strips<kM, 64, kLayout>(g);
  }
}

template <Layout kLayout, typename T>
void launch_layout(const Gated<T>& g) {
  g.m <= 64 ? launch_rows<64, kLayout>(g) : launch_rows<128, kLayout>(g);
}

template <typename T>
void launch(const Gated<T>& g) {
  STD_TORCH_CHECK(g.m <= 1024, "gated_unit: this kernel takes m up to 1024, got ", g.m);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_GATED_UNIT(gated_unit_v05_one_wave, minfer::launch)
