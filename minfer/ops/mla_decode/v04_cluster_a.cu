// v04_cluster_a: v04_cluster, where both warpgroups do the other's product first.
// Idea: stages are given back earlier.
#include "hopper_blocks.cuh"

namespace minfer {

constexpr int kPair = 2;

template <typename T>
void launch(const Mla<T>& p) {
  require_vectors(p);
  const int tiles = (p.rows() + kRows - 1) / kRows;
  if (tiles < kPair) return launch_blocks<Order::kHalves>(p);
  const auto kernel = kernel_for<T, kPair, Order::kHalves>();
  constexpr int kBytes = LatentTiles<T, kPair>::kBytes;
  int at_once = 0;
  STD_CUDA_CHECK(clusters_at_once(&at_once, kernel, kPair, kThreads, kBytes));
  STD_TORCH_CHECK(at_once > 0, "mla_decode: this GPU runs no clusters of ", kPair, " blocks with ", kBytes,
                  " bytes of shared memory");
  const int items = (tiles + kPair - 1) / kPair;
  const int clusters = workers_for(int64_t(p.batch) * items, std::min(at_once, kMostTeams / kPair)), blocks = clusters * kPair;
  const Tensor memory = memory_for(blocks);
  STD_CUDA_CHECK(launch_clusters_together(kernel, kPair, dim3(blocks), kThreads, kBytes, p.stream, make_map<kPair>(p), p,
                                          parts_for(memory, blocks), items, number_of(p.stream)));
}

}  // namespace minfer

MINFER_MLA_DECODE(mla_decode_v04_cluster_a, minfer::launch)
