// v03_cluster: a cluster of eight blocks a row, which synchronise through distributed shared memory.
// Idea: an eighth of a row, 16,032 tokens, fits a block's shared memory, so that logits are read once. Blocks of a cluster
// read each other's bins without going through L2. The hardware has a barrier for a cluster: no cooperative launch is needed.
// Expected, on an H200: for one row 2 us for the logits, 3 us for the first pass's atomics, 1 us for each of the others, 1 us
// to draw: 12 us with the launch. 64 rows are 512 blocks, of which two fit an SM: two waves, 20 us.
// Measured (H200, float32, rows=64, vocab=128256): 377.0 GB/s cold; 1672 % of torch.
#include "cuda/cluster.cuh"
#include "cuda/sample_row.cuh"
#include "sample.h"

namespace minfer {

constexpr int kThreads = 512, kCluster = 8;

struct Cluster {
  static constexpr int size = kCluster;
  int rank = cluster_rank();
  float& maximum;     // of this block, in shared memory
  uint64_t& own_sum;

  __device__ float most(float mine) const {
    if (threadIdx.x == 0) maximum = mine;
    cluster_sync();
    for (int i = 0; i < kCluster; ++i) mine = fmaxf(mine, *at_block(&maximum, i));
    return mine;
  }
  // The next operation's barrier says that all have read `mine`, which is written again behind the one after it.
  __device__ void add_up(const Bins& mine, Bins& sum) const {
    cluster_sync();
    for (int i = threadIdx.x; i < 3 * kBins; i += kThreads) {
      unsigned value = 0;
#pragma unroll
      for (int block = 0; block < kCluster; ++block)
        value += *at_block(reinterpret_cast<const unsigned*>(&mine) + i, block);
      reinterpret_cast<unsigned*>(&sum)[i] = value;
    }
    __syncthreads();
  }
  __device__ void gather(uint64_t mine, uint64_t* all) const {
    if (threadIdx.x == 0) own_sum = mine;
    cluster_sync();
    if (threadIdx.x < kCluster) all[threadIdx.x] = *at_block(&own_sum, threadIdx.x);
    __syncthreads();
  }
};

template <bool kKept, typename T>
__global__ void __launch_bounds__(kThreads, 2) in_cluster(Sample<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Workspace<kThreads> work;
  __shared__ float maximum;
  __shared__ uint64_t own_sum;
  Cluster team{.maximum = maximum, .own_sum = own_sum};
  sample_row<kThreads, kKept>(p, blockIdx.x / kCluster, team, work, reinterpret_cast<unsigned*>(shared));
  cluster_sync();  // others read this block's shared memory
}

template <bool kKept, typename T>
void launch_cluster(const Sample<T>& p, int shared) {
  const auto kernel = in_cluster<kKept, T>;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  STD_CUDA_CHECK(launch_clusters(kernel, kCluster, p.rows * kCluster, kThreads, shared, p.stream, p));
}

template <typename T>
void launch(const Sample<T>& p) {
  constexpr int kRoom = (227 << 10) - static_cast<int>(sizeof(Workspace<kThreads>)) - 1024;
  STD_TORCH_CHECK(p.rows <= INT_MAX / kCluster, "sample: logits must have fewer rows, got ", p.rows);
  const int shared = 4 * Part::longest(p.vocab, kCluster);
  shared <= kRoom ? launch_cluster<true>(p, shared) : launch_cluster<false>(p, 0);
}

}  // namespace minfer

MINFER_SAMPLE(sample_v03_cluster, minfer::launch)
