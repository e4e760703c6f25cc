// v02_cluster: a cluster of eight blocks a row, with the row's settings.
// Idea: that of sample's v03_cluster. A row's blocks synchronise only within their cluster, so rows may have different settings
// and different numbers of passes. A row that needs no pass, such as one without top_k and top_p, ends early and makes room.
// Expected, on an H100: as sample's v03_cluster, 12 us for one row of 128,256 and 20 to 90 us for 64; each block loads 4 more.
#include "cuda/cluster.cuh"
#include "cuda/sample_row.cuh"
#include "sample_rows.h"

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
  // After the next operation's barrier all blocks have read `mine`. It is written again after the barrier behind that one.
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
__global__ void __launch_bounds__(kThreads, 2) in_cluster(SampleRows<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Workspace<kThreads> work;
  __shared__ float maximum;
  __shared__ uint64_t own_sum;
  Cluster team{.maximum = maximum, .own_sum = own_sum};
  sample_row<kThreads, kKept>(p.of(blockIdx.x / kCluster, &kZero), 0, team, work, reinterpret_cast<unsigned*>(shared));
  cluster_sync();  // until here, other blocks read this block's shared memory
}

template <bool kKept, typename T>
void launch_cluster(const SampleRows<T>& p, int shared) {
  const auto kernel = in_cluster<kKept, T>;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  STD_CUDA_CHECK(launch_clusters(kernel, kCluster, p.all.rows * kCluster, kThreads, shared, p.all.stream, p));
}

template <typename T>
void launch(const SampleRows<T>& p) {
  constexpr int kRoom = (227 << 10) - static_cast<int>(sizeof(Workspace<kThreads>)) - 1024;
  STD_TORCH_CHECK(p.all.rows <= INT_MAX / kCluster, "sample_rows: logits must have fewer rows, got ", p.all.rows);
  const int shared = 4 * Part::longest(p.all.vocab, kCluster);
  shared <= kRoom ? launch_cluster<true>(p, shared) : launch_cluster<false>(p, 0);
}

}  // namespace minfer

MINFER_SAMPLE_ROWS(sample_rows_v02_cluster, minfer::launch)
