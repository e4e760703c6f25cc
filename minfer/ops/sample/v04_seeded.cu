// v04_seeded: v03_cluster, and an entry by which the blocks draw the row's random number from a seed.
// Idea: on the host, the launch that fills u takes as long as that of the kernel itself. Philox needs no state: a row's number
// is a function of the seed, the offset of the generator and the row, and each block computes it by itself.
// Expected: with u given, as fast as v03_cluster. With a seed, one thread executes 80 more instructions while logits load; this
// saves the launch of `uniform_`, about 2 us on the device and 8 us on the host.
#include "cuda/cluster.cuh"
#include "cuda/sample_row.cuh"
#include "philox.h"
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
  // All blocks have read `mine` at the next operation's barrier. It is written again only after the barrier after that.
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

struct Seed {
  uint64_t seed, offset;
  float* drawn;  // where the rows' numbers are written
};

template <bool kKept, bool kSeeded, typename T>
__global__ void __launch_bounds__(kThreads, 2) in_cluster(Sample<T> p, Seed from) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Workspace<kThreads> work;
  __shared__ float maximum;
  __shared__ float u;
  __shared__ uint64_t own_sum;
  Cluster team{.maximum = maximum, .own_sum = own_sum};
  const int row = blockIdx.x / kCluster;
  if constexpr (kSeeded) {
    if (threadIdx.x == 0) {  // others read u after several barriers
      u = uniform_of(from.seed, from.offset, row);  //@ row
      if (team.rank == 0) from.drawn[row] = u;
    }
    p.tokens += row, p.logits += row * p.stride, p.u = &u;  //@ logits
  }
  sample_row<kThreads, kKept>(p, kSeeded ? 0 : row, team, work, reinterpret_cast<unsigned*>(shared));
  cluster_sync();  // others read this block's shared memory
}

template <bool kKept, bool kSeeded, typename T>
void launch_cluster(const Sample<T>& p, Seed from, int shared) {
  const auto kernel = in_cluster<kKept, kSeeded, T>;
  if (shared > (32 << 10)) STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  STD_CUDA_CHECK(launch_clusters(kernel, kCluster, p.rows * kCluster, kThreads, shared, p.stream, p, from));
}

template <bool kSeeded, typename T>
void launch_from(const Sample<T>& p, Seed from) {
  constexpr int kRoom = (227 << 10) - static_cast<int>(sizeof(Workspace<kThreads>)) - 1024;
  STD_TORCH_CHECK(p.rows <= INT_MAX / kCluster, "sample: logits must have fewer rows, got ", p.rows);
  const int shared = 4 * Part::longest(p.vocab, kCluster);
  shared <= kRoom ? launch_cluster<true, kSeeded>(p, from, shared) : launch_cluster<false, kSeeded>(p, from, 0);
}

template <typename T>
void launch(const Sample<T>& p) {
  launch_from<false>(p, {});
}

}  // namespace minfer

MINFER_SAMPLE(sample_v04_seeded, minfer::launch)

// Draws u of each row, and a token by it. `offset` is that of a generator, a multiple of 4.
static void sample_v04_seeded_draw(minfer::Tensor tokens, const minfer::Tensor logits, minfer::Tensor u, int64_t seed,
                                   int64_t offset, double temperature, int64_t top_k, double top_p, double min_p) {
  STD_TORCH_CHECK(offset >= 0 && offset % 4 == 0, "sample: offset must be a multiple of 4 from 0, got ", offset);
  minfer::dispatch_sample(tokens, logits, u, temperature, top_k, top_p, min_p, [&](const auto& p) {
    const minfer::Seed from{uint64_t(seed), uint64_t(offset), minfer::output<float>(u, "sample: u")};
    minfer::launch_from<true>(p, from);
  });
}
MINFER_OP(sample_v04_seeded_draw,
          "(Tensor(a!) tokens, Tensor logits, Tensor(b!) u, int seed, int offset, float temperature=1.0, int top_k=0, "
          "float top_p=1.0, float min_p=0.0) -> ()")
