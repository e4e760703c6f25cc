// v01_naive: one block a row, with the row's settings.
// Idea: that of sample's v01_naive. A block draws a row by itself, so rows may have different settings. It runs on every GPU.
// Expected: as sample's v01_naive, about 120 us for 64 rows of 128,256; the row with the most passes decides.
#include "cuda/sample_row.cuh"
#include "sample_rows.h"

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
__global__ void __launch_bounds__(kThreads, 1) naive(SampleRows<T> p) {
  __shared__ Workspace<kThreads> work;
  Alone team;
  sample_row<kThreads, false>(p.of(blockIdx.x, &kZero), 0, team, work, nullptr);
}

template <typename T>
void launch(const SampleRows<T>& p) {
  naive<<<p.all.rows, kThreads, 0, p.all.stream>>>(p);
}

}  // namespace minfer

MINFER_SAMPLE_ROWS(sample_rows_v01_naive, minfer::launch)
