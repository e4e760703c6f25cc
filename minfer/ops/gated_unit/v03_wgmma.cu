// v03_wgmma: hgemm's v13 with two weights: one wgmma of 256 columns adds up 128 of each product.
// Idea: the tiles of W1 and of W2 lie beside each other in a stage, as one b of 256 columns, so that the mainloop is that of a
// plain product: TMA, four stages, one producer, two consumer warpgroups of 64 rows, clusters of two blocks that share the
// weights, of which each copies one. Both sums of an element are in one thread. The gate takes 128 exponentials and
// reciprocals a thread and tile, about 1000 cycles of a warpgroup, while it starts no products: the second warpgroup begins
// two steps late and stays behind, so that one's gate is under the other's products. Half as much is stored as hgemm does.
// Expected: the rate of hgemm's v13 for one product of 2 n columns, 745 TFLOP/s at 4096 and 690 at 8192; at 4096 the gate
// would take 3 % of a tile if nothing were under it.
// Measured (H200, float16, sigmoid, NN, m=n=k=8192): 723.7 TFLOP/s cold, 629.5 steady; 119.3 % and 113.1 % of torch.
#include "cuda/gemm/cooperative.cuh"
#include "hopper_tile.cuh"

namespace minfer {

constexpr int kY = kBlockN / 2;  // columns of y in a tile
constexpr int kLag = 2;          // steps by which the second warpgroup is behind; 0: it waits for nothing
static_assert(kLag <= kStages && kConsumers == 2 && kRows == 64);

template <typename T, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ GatedMaps maps, Gated<T> g) {
  extern __shared__ __align__(1024) unsigned char shared[];
  uint64_t* begun = reinterpret_cast<uint64_t*>(shared + Stages<T, kLayout>::kBytes);
  if (threadIdx.x == 0) barrier_init(begun, 4);
  Stages<T, kLayout> stages(shared);  // and a barrier of all
  const int steps = (g.k + kBlockK - 1) / kBlockK, warpgroup = warpgroup_index();
  WorkTileScheduler<kBlockM, kY, kCluster, kGroup> scheduler(g);
  if (warpgroup == kConsumers) {
    registers_down<40>();
    if (threadIdx.x == kConsumers * 128)
      for (bool back = false; scheduler.goes_on(); scheduler.advance(1), back = !back) {
        const int2 origin = scheduler.origin();
#pragma unroll 1  // a cold kernel waits for each of its instructions to come from memory
        for (int step = 0; step < steps; ++step, stages.ring.advance()) {
          uint64_t* filled = stages.wait_empty();
          const int k = (back ? steps - 1 - step : step) * kBlockK;
          GatedStage<T, kLayout, kBlockM, kY>::load_shared(stages.stage(), maps, filled, origin.x, origin.y, k,
                                                           scheduler.rank);
        }
      }
  } else {
    registers_up<232>();
    using Tile = GatedTile<T, kLayout, kY>;
    Sums<T, kLayout, T, typename Tile::Y> sums;
    int until = warpgroup == 0 ? min(kLag, steps) - 1 : -1;  // the step after which the other may begin
    if (kLag > 0 && warpgroup == 1) barrier_wait(begun, 0);
    for (; scheduler.goes_on(); scheduler.advance(1)) {
      sums.multiply(stages, maps, 0, steps, [&](int step) {
        if (step != until) return;
        if (threadIdx.x % 32 == 0) barrier_arrive(begun);
        until = -1;
      });
      const int2 origin = scheduler.origin();
      const typename Tile::Biases biases(g, origin.y);
      typename Tile::Y y;
      Tile::finish(y, sums.tile, biases, g.silu);
      sums.outgoing.take(y, origin.x + sums.row, origin.y);
    }
    sums.finish(stages, maps);
  }
  cluster_sync_relaxed();  // no block ends while another arrives at its barriers
}

template <Layout kLayout, typename T>
void launch_layout(const Gated<T>& g) {
  constexpr int kBytes = Stages<T, kLayout>::kBytes + sizeof(uint64_t);
  static_assert(kBytes <= 227 << 10, "more than a block has");
  const GatedMaps maps = make_gated_maps(g, kBlockM, kY, 64);
  const int clusters = persistent_grid<kBlockM, kY, kCluster>(multiply<T, kLayout>, kThreads, kBytes, g).clusters;
  STD_CUDA_CHECK(launch_clusters(multiply<T, kLayout>, kCluster, clusters * kCluster, kThreads, kBytes, g.stream, maps, g));
}

template <typename T>
void launch(const Gated<T>& g) {
  g.layout == Layout::TN ? launch_layout<Layout::TN>(g) : launch_layout<Layout::NN>(g);
}

}  // namespace minfer

MINFER_GATED_UNIT(gated_unit_v03_wgmma, minfer::launch)
