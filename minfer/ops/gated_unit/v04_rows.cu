// v04_rows: k up to 128: both weights stay in shared memory, rows of x stream through it once, and y leaves by TMA.
// Idea: one block an SM keeps 64 columns of the weights and goes over tiles of 64 rows. A thread copies, nine tiles (144 KB)
// ahead; three warpgroups take the tiles in turn, so that one's gate and stores are under another's products and waiting.
// Expected: at (1048576, 128) x (128, 64) 0.9 of a copy's speed, 105 us on an H200. An SM's share of memory's speed brings a
// tile in 1300 cycles; its products take 512, its gate 512 of the special function units and some 300 of the others.
// Measured (H200, float16, sigmoid, NN, m=4194304, n=64, k=128): 341.9 TFLOP/s cold, 332.6 steady; 674.2 % and 654.7 % of
//   torch.
#include "hopper_tile.cuh"

namespace minfer {

constexpr int kTileM = 64, kTileN = 64, kMostSteps = 2;  // of 64 in k
constexpr int kConsumers = 3, kStages = 9, kThreads = (kConsumers + 1) * 128;
constexpr int kBoxes = 2;  // of 16 rows, that a warp stores from, so that one is filled while the other is read
static_assert(kStages % kConsumers == 0);  // a stage is always the same warpgroup's: none takes it a phase too late

template <typename T, Layout kLayout>
struct Shared {
  using Tile = GatedTile<T, kLayout, kTileN>;
  using Weights = GatedStage<T, kLayout, 0, kTileN>;  // 64 steps in k of both
  static constexpr int kWeights = kMostSteps * Weights::kElements, kStage = kMostSteps * kTileM * kBlockK;
  static constexpr int kBox = Tile::Y::kBox, kAllBoxes = kConsumers * 4 * kBoxes * kBox;
  static constexpr int kBytes =
      (kWeights + kStages * kStage + kAllBoxes) * sizeof(T) + (2 * kStages + 1) * sizeof(uint64_t);
  static_assert(kBytes <= 227 << 10, "more than a block has");
};

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 1) stream(const __grid_constant__ GatedMaps maps, Gated<T> g) {
  using S = Shared<T, kLayout>;
  using Tile = typename S::Tile;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* weights = reinterpret_cast<T*>(shared);
  T* stages = weights + S::kWeights;
  T* boxes = stages + kStages * S::kStage;
  uint64_t* full = reinterpret_cast<uint64_t*>(boxes + S::kAllBoxes);
  uint64_t *empty = full + kStages, *ready = empty + kStages;  // ready: the weights are there
  const int col0 = blockIdx.y * kTileN, tiles = (g.m + kTileM - 1) / kTileM, steps = (g.k + kBlockK - 1) / kBlockK;
  constexpr int kProducer = kConsumers * 128;

  if (threadIdx.x == kProducer) {
    for (int stage = 0; stage < kStages; ++stage) barrier_init(full + stage, 1), barrier_init(empty + stage, 4);
    barrier_init(ready, 1);
    barrier_init_fence();
  }
  __syncthreads();

  Ring<kStages> ring;
  const int warpgroup = warpgroup_index();
  if (warpgroup == kConsumers) {
    registers_down<24>();
    if (threadIdx.x != kProducer) return;
    barrier_expect(ready, steps * S::Weights::kBytes);
    for (int step = 0; step < steps; ++step) {
      T* w = weights + step * S::Weights::kElements;
      S::Weights::load_weight(w, maps.b, ready, col0, step * kBlockK);
      S::Weights::load_weight(w + S::Weights::kW, maps.w2, ready, col0, step * kBlockK);
    }
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ring.advance()) {
      barrier_wait(empty + ring.stage, ring.parity ^ 1);
      barrier_expect(full + ring.stage, steps * kTileM * kBlockK * sizeof(T));
      for (int step = 0; step < steps; ++step)
        tma_load(stages + ring.stage * S::kStage + step * kTileM * kBlockK, maps.a, full + ring.stage, step * kBlockK,
                 tile * kTileM);
    }
    return;
  }

  registers_up<160>();
  const typename Tile::Biases biases(g, col0);
  typename Tile::Both both;
  typename Tile::Y y;
  T* const mine = boxes + threadIdx.x / 32 * kBoxes * S::kBox;
  T* box = mine;
  barrier_wait(ready, 0);  //@ weights_arrived
  ring.skip(warpgroup);
#pragma unroll 1
  for (int tile = blockIdx.x + warpgroup * gridDim.x; tile < tiles; tile += kConsumers * gridDim.x) {
    barrier_wait(full + ring.stage, ring.parity);
    for (int step = 0; step < steps; ++step)
      both.multiply(stages + ring.stage * S::kStage + step * kTileM * kBlockK, weights + step * S::Weights::kElements,
                    step == 0);
    wgmma_finish(both.sums);
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + ring.stage);
    ring.skip(kConsumers);
    Tile::finish(y, both, biases, g.silu);
    uint32_t bits[kTileN / 4];
    y.pack(bits, 0);
    Tile::Y::template store_box<kBoxes - 1>(maps, box, bits, 0, tile * kTileM, col0);
    box = box == mine ? mine + S::kBox : mine;  //@ box
  }
  if (threadIdx.x % 32 == 0) tma_store_wait<0>();
}

template <Layout kLayout, typename T>
void launch_layout(const Gated<T>& g) {
  const int tiles = (g.m - 1) / kTileM + 1, strips = (g.n - 1) / kTileN + 1;
  STD_TORCH_CHECK(g.k <= kMostSteps * kBlockK, "gated_unit: this kernel takes k up to 128, got ", g.k);
  STD_TORCH_CHECK(strips <= 65535, "gated_unit: this kernel takes n up to ", 65535 * kTileN, ", got ", g.n);
  const GatedMaps maps = make_gated_maps(g, kTileM, kTileN, 64);
  allow_shared(stream<T, kLayout>, Shared<T, kLayout>::kBytes);
  const dim3 blocks(std::min(tiles, std::max(1, multiprocessors() / strips)), strips);
  STD_CUDA_CHECK(launch_clusters(stream<T, kLayout>, 1, blocks, kThreads, Shared<T, kLayout>::kBytes, g.stream, maps, g));
}

template <typename T>
void launch(const Gated<T>& g) {
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_GATED_UNIT(gated_unit_v04_rows, minfer::launch)
