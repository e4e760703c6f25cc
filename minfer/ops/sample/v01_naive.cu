// v01_naive: one block a row, which reads the row anew in each pass.
// Idea: no sort (cuda/sample_row.cuh): the threshold is found by its digits, with bins in shared memory, and the token by its
// place in the running sum. A row of 128,256 does not fit a block's registers or shared memory.
// Expected: in a pass over 128,256 logits an SM makes 2,004 loads of 128 bytes, about 5 us from L2; the first pass adds about
// 10 us of atomics. With top_k and top_p there are 4 to 7 passes: 40 us for 1 row as for 64.
// Measured (H200, float32, rows=64, vocab=128256): 261.9 GB/s cold; 1161 % of torch.
#include "cuda/sample_row.cuh"
#include "sample.h"

namespace minfer {

constexpr int kThreads = 1024;

struct Alone {
  static constexpr int rank = 0, size = 1;

  __device__ float most(float mine) const { return mine; }
  __device__ void add_up(const Bins& mine, Bins& sum) const {
    __syncthreads();
    for (int i = threadIdx.x; i < 3 * kBins; i += kThreads)
      reinterpret_cast<unsigned*>(&sum)[i] = reinterpret_cast<const unsigned*>(&mine)[i];
    __syncthreads();
  }
  __device__ void gather(uint64_t mine, uint64_t* all) const {
    if (threadIdx.x == 0) all[0] = mine;
    __syncthreads();
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) naive(Sample<T> p) {
  __shared__ Workspace<kThreads> work;
  Alone team;
  sample_row<kThreads, false>(p, blockIdx.x, team, work, nullptr);
}

template <typename T>
void launch(const Sample<T>& p) {
  naive<<<p.rows, kThreads, 0, p.stream>>>(p);
}

}  // namespace minfer

MINFER_SAMPLE(sample_v01_naive, minfer::launch)
