// v14_small: small tiles, and where they are fewer than multiprocessors, clusters that share one tile's steps in k.
// Idea: 64x128 tiles make four times as many blocks as v13's. Each of a cluster's blocks adds up a slice of k, lays its
// sums into its shared memory, and adds a part of the rows of all: split-K with no workspace, no atomics and one order.
// Expected: 1.5x over v12 at 1024 and less, where half of the multiprocessors have nothing to do; slower from 2048 on,
// where small tiles read more bytes a product. Measured: see README.md.
#include "warpgroup_tile.cuh"

namespace minfer {

constexpr int kBlockM = 64, kBlockN = 128, kStages = 8;  // 192 KB under way hide the latency of short loops
constexpr int kThreads = 128 + 32;                       // a consumer warpgroup, and a warp that copies
constexpr int kMostSlices = 8;                           // blocks of a cluster
constexpr int kGroup = 16;
constexpr int kSumsStride = kBlockN + 4;  // floats; rows of sums that a warp reads or writes at once differ in banks

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ Maps maps, Gemm<T> g, int slices) {
  using Tiles = Stage<T, kLayout, kBlockM, kBlockN>;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);
  uint64_t* full = reinterpret_cast<uint64_t*>(stages + kStages * Tiles::kElements);
  uint64_t* empty = full + kStages;
  const int tile_number = blockIdx.x / slices, slice = blockIdx.x - tile_number * slices;
  const int2 place = grouped<kGroup>(tile_number, (g.m + kBlockM - 1) / kBlockM, (g.n + kBlockN - 1) / kBlockN);
  const int row0 = place.x * kBlockM, col0 = place.y * kBlockN, steps = (g.k + kBlockK - 1) / kBlockK;
  const int first = int64_t(steps) * slice / slices, end = int64_t(steps) * (slice + 1) / slices;

  if (threadIdx.x == 0)
    for (int stage = 0; stage < kStages; ++stage) barrier_init(full + stage, 1), barrier_init(empty + stage, 4);
  barrier_init_fence();
  __syncthreads();

  Ring<kStages> ring;
  WarpgroupTile<T, kLayout, kBlockM, kBlockN> tile;
  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128)
      for (int step = first; step < end; ++step, ring.advance()) {
        barrier_wait(empty + ring.stage, ring.parity ^ 1);
        Tiles::load(stages + ring.stage * Tiles::kElements, maps, full + ring.stage, row0, col0, step * kBlockK);
      }
  } else {
    const auto release = [&](int stage) {
      if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage);
    };
    int before = 0;
    for (int step = first; step < end; ++step, ring.advance()) {
      const T* stage = stages + ring.stage * Tiles::kElements;
      barrier_wait(full + ring.stage, ring.parity);
      tile.multiply(stage, stage + Tiles::kA, step == first);
      wgmma_wait<1>();
      if (step > first) release(before);
      before = ring.stage;
    }
    wgmma_finish(tile.sums);
    if (slices == 1) {
      tile.scale(g, row0, col0);
      tile.store(g, row0, col0);
    }
  }
  if (slices == 1) return;

  float* sums = reinterpret_cast<float*>(shared);
  __syncthreads();  // all stages are read
  if (threadIdx.x < 128)
    tile.for_pairs(0, 0, [&](int row, int col, float& x, float& y) {
      *reinterpret_cast<float2*>(sums + row * kSumsStride + col) = {x, y};
    });
  cluster_sync();
  constexpr int kPieces = kBlockN / 4;
  for (int i = slice * kThreads + threadIdx.x; i < kBlockM * kPieces; i += slices * kThreads) {
    const int row = i / kPieces, col = i % kPieces * 4;
    if (row0 + row >= g.m || col0 + col >= g.n) continue;
    float4 sum{};
    for (int from = 0; from < slices; ++from) {
      const float4 part = *reinterpret_cast<const float4*>(cluster_address(sums + row * kSumsStride + col, from));
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    store_4(g, row0 + row, col0 + col, sum);
  }
  cluster_sync();  // no block ends while another reads its sums
}

// As many slices as multiprocessors have nothing to do, each of two steps or more.
inline int slices_for(int64_t tiles, int steps) {
  const int processors = multiprocessors();
  int slices = 1;
  while (slices < kMostSlices && tiles * slices * 2 <= processors && slices * 4 <= steps) slices *= 2;
  return slices;
}

template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  constexpr int kBytes = kStages * (Stage<T, kLayout, kBlockM, kBlockN>::kBytes + 2 * sizeof(uint64_t));
  static_assert(kBlockM * kSumsStride * sizeof(float) <= kBytes && kBytes <= 227 << 10);
  const Maps maps = make_maps(g, kBlockM, kBlockN);
  const int64_t tiles = int64_t(ceil_div(g.m, kBlockM)) * ceil_div(g.n, kBlockN);
  const int slices = slices_for(tiles, ceil_div(g.k, kBlockK));
  STD_TORCH_CHECK(tiles * slices <= INT_MAX, "hgemm: more output tiles than a launch has blocks");
  allow_shared(multiply<T, kLayout>, kBytes);
  STD_CUDA_CHECK(launch_clusters(multiply<T, kLayout>, slices, int(tiles) * slices, kThreads, kBytes, g.stream, maps, g,
                                 slices));
}

template <typename T>
void launch(const Gemm<T>& g) {
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v14_small, minfer::launch)
