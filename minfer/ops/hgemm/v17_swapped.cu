// v17_swapped: up to 128 rows of A; B^T takes the 64-row side of wgmma, and clusters share the k of a tile.
// Idea: the speed of memory is bytes under way over latency, and TMA keeps most of shared memory under way for one
// instruction a box, where v16 spends registers and instructions. With B^T as the first operand, 8 rows of A are not
// padded to 64. Each of a cluster's blocks adds up a slice of k, lays its sums into its shared memory, and adds a part
// of the rows of all: split-K with no workspace, no atomics and one order.
// Expected: v16's speed up to 16 rows, where memory is all; 1.2x at 64, and at 128, where v16's tiles read more of the
// L2 than it gives, 1.4x. Measured: see README.md.
#include "warpgroup_tile.cuh"

namespace minfer {

constexpr int kThreads = 128 + 32;  // a consumer warpgroup, and a warp that copies
constexpr int kMostSlices = 8;      // blocks of a cluster
constexpr int kLeastSteps = 4;      // of 64 in k, that a slice is worth

// A whole in that many parts, as equal as may be: where each begins, and the end, without a division on the device.
struct Parts {
  uint64_t fraction;  // of 2^32
  explicit Parts(int parts) : fraction(((uint64_t{1} << 32) + parts - 1) / parts) {}
  __device__ int of(int whole, int part) const { return int(part * fraction * whole >> 32); }
};

// kM rows of A by kN columns of B. kBlocks run together on a multiprocessor.
template <typename T_, Layout kLayout_, int kM_, int kN_, int kStages_, int kBlocks_>
struct Shape {
  using T = T_;
  static constexpr Layout kLayout = kLayout_;
  static constexpr int kM = kM_, kN = kN_, kStages = kStages_, kBlocks = kBlocks_;
  using Tiles = Stage<T, kLayout, kM, kN>;
  static constexpr int kSumsStride = kN + 4;  // floats; what a warp reads or writes at once is in different banks
  static constexpr int kBytes = kStages * (Tiles::kBytes + 2 * sizeof(uint64_t));
  static_assert(kM * kSumsStride * sizeof(float) <= kStages * Tiles::kBytes);
  static_assert(kBlocks * (kBytes + 1024) <= 228 << 10, "more than a multiprocessor has");
};

template <typename Shape>
__global__ void __launch_bounds__(kThreads, Shape::kBlocks)
    multiply(const __grid_constant__ Maps maps, Gemm<typename Shape::T> g, Parts parts) {
  using T = typename Shape::T;
  using Tiles = typename Shape::Tiles;
  constexpr int kM = Shape::kM, kN = Shape::kN, kStages = Shape::kStages;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* stages = reinterpret_cast<T*>(shared);
  uint64_t* full = reinterpret_cast<uint64_t*>(stages + kStages * Tiles::kElements);
  uint64_t* empty = full + kStages;
  const int slices = gridDim.x, slice = blockIdx.x, col0 = blockIdx.y * kN;
  const int steps = (g.k + kBlockK - 1) / kBlockK;
  const int first = parts.of(steps, slice), end = parts.of(steps, slice + 1);

  Ring<kStages> ring;
  const auto load = [&](int step) {
    Tiles::load(stages + ring.stage * Tiles::kElements, maps, full + ring.stage, 0, col0, step * kBlockK);
    ring.advance();
  };
  const int ahead = min(kStages, end - first);  // copies that start before the block's first barrier
  if (threadIdx.x == 0) tma_prefetch(maps.a), tma_prefetch(maps.b);
  if (threadIdx.x == 128) {
    for (int stage = 0; stage < kStages; ++stage) barrier_init(full + stage, 1), barrier_init(empty + stage, 4);
    barrier_init_fence();
#pragma unroll 1  // a cold kernel waits for each of its instructions to come from memory
    for (int step = first; step < first + ahead; ++step) load(step);
  }
  __syncthreads();

  SwappedTile<T, Shape::kLayout, kM, kN> tile;
  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128)
#pragma unroll 1
      for (int step = first + ahead; step < end; ++step) {
        barrier_wait(empty + ring.stage, ring.parity ^ 1);
        load(step);
      }
  } else {
    const auto release = [&](int stage) {
      if (threadIdx.x % 32 == 0) barrier_arrive(empty + stage);
    };
    int before = 0;
#pragma unroll 1
    for (int step = first; step < end; ++step, ring.advance()) {
      const T* stage = stages + ring.stage * Tiles::kElements;
      barrier_wait(full + ring.stage, ring.parity);
      tile.multiply(stage, stage + Tiles::kA, step == first);
      wgmma_wait<1>();
      if (step > first) release(before);
      before = ring.stage;
    }
    wgmma_finish(tile.sums);
  }

  float* laid = reinterpret_cast<float*>(shared);
  __syncthreads();  // all stages are read
  if (threadIdx.x < 128) {
    tile.for_each([&](int row, int col, float& sum) { laid[row * Shape::kSumsStride + col] = sum; });
  }
  slices > 1 ? cluster_sync() : __syncthreads();
  constexpr int kPieces = kN / 4;
  for (int i = slice * kThreads + threadIdx.x; i < g.m * kPieces; i += slices * kThreads) {
    const int row = i / kPieces, col = i % kPieces * 4;
    if (col0 + col >= g.n) continue;
    float4 parts[kMostSlices];
#pragma unroll
    for (int from = 0; from < kMostSlices; ++from)  // all are under way at once
      if (from < slices)
        parts[from] = *reinterpret_cast<const float4*>(cluster_address(laid + row * Shape::kSumsStride + col, from));
    float4 sum{};
#pragma unroll
    for (int from = 0; from < kMostSlices; ++from)
      if (from < slices)
        sum.x += parts[from].x, sum.y += parts[from].y, sum.z += parts[from].z, sum.w += parts[from].w;
    store_4(g, row, col0 + col, sum);
  }
  if (slices > 1) cluster_sync();  // no block ends while another reads its sums
}

// As many slices of k as run at once, each of kLeastSteps or more.
template <typename Shape>
int slices_for(int64_t tiles, int steps) {
  for (int slices = kMostSlices; slices > 1; slices /= 2) {
    if (slices * kLeastSteps > steps) continue;
    int clusters = 0;
    STD_CUDA_CHECK(clusters_at_once(&clusters, multiply<Shape>, slices, kThreads, Shape::kBytes));
    if (tiles <= clusters) return slices;
  }
  return 1;
}

template <typename Shape, typename T>
void launch_shape(const Gemm<T>& g) {
  allow_shared(multiply<Shape>, Shape::kBytes);
  const int tiles = ceil_div(g.n, Shape::kN), slices = slices_for<Shape>(tiles, ceil_div(g.k, kBlockK));
  STD_TORCH_CHECK(tiles <= 65535, "hgemm: this kernel takes n up to ", 65535 * Shape::kN, ", got ", g.n);
  STD_CUDA_CHECK(launch_clusters(multiply<Shape>, slices, dim3(slices, tiles), kThreads, Shape::kBytes, g.stream,
                                 make_maps(g, Shape::kM, Shape::kN), g, Parts(slices)));
}

// Wider tiles read less of A; narrow ones are better where they all run at once.
template <Layout kLayout, typename T>
void launch_layout(const Gemm<T>& g) {
  const bool wide = ceil_div(g.n, 64) > 3 * multiprocessors();
  if (g.m <= 8) return launch_shape<Shape<T, kLayout, 8, 64, 6, 4>>(g);
  if (g.m <= 32) return launch_shape<Shape<T, kLayout, 32, 64, 4, 4>>(g);
  if (g.m <= 64 && wide) return launch_shape<Shape<T, kLayout, 64, 128, 4, 2>>(g);
  if (g.m <= 64) return launch_shape<Shape<T, kLayout, 64, 64, 4, 3>>(g);
  if (wide) return launch_shape<Shape<T, kLayout, 128, 128, 3, 2>>(g);
  launch_shape<Shape<T, kLayout, 128, 64, 3, 3>>(g);
}

template <typename T>
void launch(const Gemm<T>& g) {
  STD_TORCH_CHECK(g.m <= 128, "hgemm: this kernel takes m up to 128, got ", g.m);
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_HGEMM(hgemm_v17_swapped, minfer::launch)
