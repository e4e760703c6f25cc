// v02_split: all blocks that run at once share the rows; those of one row synchronise through global memory.
// Idea: with one block a row, one row of 128,256 leaves 131 SMs idle. Blocks of a cooperative launch add their bins to the
// row's in L2, by integer atomics, and meet at a barrier of that row. Each keeps its part in shared memory where it fits.
// Expected, for one row on an H200: 64 blocks have 2,004 tokens each, so that a pass is the barrier and two trips to L2,
// about 2.5 us; with top_k and top_p 4 to 7 passes, and two more meetings: 20 us.
// Measured (H200, float32, rows=64, vocab=128256): 390.0 GB/s cold, 414.7 steady; 1730 % and 1755 % of torch.
#include "cuda/counters.cuh"
#include "cuda/grid.cuh"
#include "cuda/sample_row.cuh"
#include "sample.h"

namespace minfer {

constexpr int kThreads = 512, kBlocksOfSm = 2;  // that certainly run at once
constexpr int kMostPasses = 7;                  // four digits each, of which the first is shared
constexpr int kBinWords = 3 * kBins;

// A row's words of scratch memory: blocks' masses and maxima, and the bins of each pass.
constexpr int words_of(int size) { return 3 * size + size % 2 + kMostPasses * kBinWords; }

struct Split {
  int rank, size;
  unsigned* arrived;
  uint64_t* sums;
  float* maxima;
  unsigned* bins;  // of the next pass

  __device__ Split(int size, unsigned* words, unsigned* arrived)
      : rank(blockIdx.x % size), size(size), arrived(arrived), sums(reinterpret_cast<uint64_t*>(words)),
        maxima(reinterpret_cast<float*>(words + 2 * size)), bins(words + 3 * size + size % 2) {}

  __device__ void sync() const {
    if (size > 1) team_sync(arrived, size, rank == 0);
    else __syncthreads();
  }
  __device__ float most(float mine) const {
    if (threadIdx.x == 0) maxima[rank] = mine;
    for (int i = rank * kThreads + threadIdx.x; i < kMostPasses * kBinWords; i += size * kThreads) bins[i] = 0;
    sync();
    for (int i = 0; i < size; ++i) mine = fmaxf(mine, __ldcg(maxima + i));
    return mine;
  }
  __device__ void add_up(const Bins& mine, Bins& sum) {
    __syncthreads();
    for (int i = threadIdx.x; i < kBinWords; i += kThreads)
      if (const unsigned value = reinterpret_cast<const unsigned*>(&mine)[i]) atomicAdd(bins + i, value);
    sync();  //@ bins_there
    for (int i = threadIdx.x; i < kBinWords; i += kThreads) reinterpret_cast<unsigned*>(&sum)[i] = __ldcg(bins + i);
    bins += kBinWords;  //@ next_bins
    __syncthreads();
  }
  __device__ void gather(uint64_t mine, uint64_t* all) const {
    if (threadIdx.x == 0) sums[rank] = mine;
    sync();
    if (threadIdx.x < size) all[threadIdx.x] = __ldcg(sums + threadIdx.x);
    __syncthreads();
  }
};

template <bool kKept, typename T>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm) split(Sample<T> p, int size, unsigned* words, unsigned* counters) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Workspace<kThreads> work;
  const int row = blockIdx.x / size;
  Split team(size, words + int64_t(row) * words_of(size), counters + row);
  sample_row<kThreads, kKept>(p, row, team, work, reinterpret_cast<unsigned*>(shared));
}

template <bool kKept, typename T>
void launch_split(const Sample<T>& p, int size, int shared) {
  const auto kernel = split<kKept, T>;
  const auto scratch = scratch_words(int64_t(p.rows) * words_of(size));
  unsigned* words = static_cast<unsigned*>(scratch.mutable_data_ptr());
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  if (size == 1) {  // blocks that wait for nobody may be more than run at once
    kernel<<<p.rows, kThreads, shared, p.stream>>>(p, size, words, nullptr);
    return;
  }
  STD_CUDA_CHECK(launch_together(kernel, p.rows * size, kThreads, shared, p.stream, p, size, words, counters_of(p.stream)));
}

template <typename T>
void launch(const Sample<T>& p) {
  int device = 0, most = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const int at_once = kBlocksOfSm * multiprocessors() / p.rows;
  const int useful = (p.vocab + kThreads - 1) / kThreads;  // with a token for each thread
  const int size = std::max(1, std::min({at_once, useful, kMostTeam}));
  const int shared = 4 * Part::longest(p.vocab, size);
  const bool fits = shared <= most / kBlocksOfSm - static_cast<int>(sizeof(Workspace<kThreads>)) - 2048;
  fits ? launch_split<true>(p, size, shared) : launch_split<false>(p, size, 0);
}

}  // namespace minfer

MINFER_SAMPLE(sample_v02_split, minfer::launch)
