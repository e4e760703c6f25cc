// v04_cluster: the blocks of two tiles of query rows are a cluster, and each copies half of the rows of the cache to both.
// Idea: 128 heads are two tiles of 64 query rows, for which v03 loads the same rows of the cache twice. With 600 TFLOP/s that
// is 5 TB/s from the L2. TMA's multicast halves it: a cluster has the two tiles of an item, and a copy of 32 rows goes to both
// blocks. A part of a stage is given back to both producers. With one tile there is nothing to share, and blocks are alone as
// in v03.
// Expected: with 128 heads up to a tenth faster than v03, where copies are what its tensor cores wait for, and less power;
// one block waits for the other's softmax now and then. With up to 64 query rows (heads times new tokens) it is v03.
// Measured (H200, bfloat16, 64, full, batch=16, new=1, longest=16384, heads=128): 561.2 TFLOP/s cold; 1318 % of torch.
#include "hopper_blocks.cuh"

namespace minfer {

constexpr int kPair = 2;

template <typename T>
void launch(const Mla<T>& p) {
  require_vectors(p);
  const int tiles = (p.rows() + kRows - 1) / kRows;
  if (tiles < kPair) return launch_blocks(p);
  const auto kernel = kernel_for<T, kPair>();
  constexpr int kBytes = LatentTiles<T, kPair>::kBytes;
  int at_once = 0;
  STD_CUDA_CHECK(clusters_at_once(&at_once, kernel, kPair, kThreads, kBytes));
  STD_TORCH_CHECK(at_once > 0, "mla_decode: this GPU runs no clusters of ", kPair, " blocks with ", kBytes,
                  " bytes of shared memory");
  const int items = (tiles + kPair - 1) / kPair;
  const int clusters = workers_for(int64_t(p.batch) * items, std::min(at_once, kMostCounters / kPair));
  const int blocks = clusters * kPair;
  const Tensor memory = memory_for(blocks);
  STD_CUDA_CHECK(launch_clusters_together(kernel, kPair, dim3(blocks), kThreads, kBytes, p.stream, make_map<kPair>(p), p,
                                          parts_for(memory, blocks), items, counters_of(p.stream)));
}

}  // namespace minfer

MINFER_MLA_DECODE(mla_decode_v04_cluster, minfer::launch)
