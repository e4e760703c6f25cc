// v01_one, v02_two, v03_four, v04_eight, v05_sixteen: a copy with so many elements a thread.
// Idea: memory answers after hundreds of cycles, so that what matters is how many bytes have been asked for and not yet
// come. Many threads with one load each, or a few with many loads each, make the same number: occupancy and instruction-level
// parallelism are two ways to one end. Every load is of 4 bytes, so that only their number differs.
// Expected (Little's law): a bandwidth of 4.3 TB/s, half of it reads, times a latency of about 600 ns is 1.3 MB on the way,
// 9.8 KB on each of an H200's 132 multiprocessors. 2048 threads with 1 element have 8 KB on the way, with 2 elements 16 KB.
// So at full occupancy one element is nearly enough and two are; at half it takes 2 to 4, at a quarter 4 to 8, at an eighth
// (256 threads) 8 to 16: the curves are one curve over threads x elements.
#include <algorithm>

#include "ops/op.h"

namespace minfer {

constexpr int kThreads = 256;

template <int kElements>
__global__ void __launch_bounds__(kThreads) copies(float* y, const float* x, int n) {
  const int64_t first = int64_t(blockIdx.x) * kThreads * kElements + threadIdx.x;
  float elements[kElements];
  if (first + (kElements - 1) * kThreads < n) {  // no branch between the loads
#pragma unroll
    for (int i = 0; i < kElements; ++i) elements[i] = x[first + i * kThreads];
#pragma unroll
    for (int i = 0; i < kElements; ++i) y[first + i * kThreads] = elements[i];
  } else {
#pragma unroll 1
    for (int64_t at = first; at < n; at += kThreads) y[at] = x[at];
  }
}

// The dynamic shared memory with which at most a `share`th of the blocks fit a multiprocessor that would fit without.
template <int kElements>
int shared_for(int share) {
  // With much shared memory there is little L1, so that the whole share must not be left with what the last call wanted.
  const int carveout = share == 1 ? cudaSharedmemCarveoutDefault : cudaSharedmemCarveoutMaxShared;
  STD_CUDA_CHECK(cudaFuncSetAttribute(copies<kElements>, cudaFuncAttributePreferredSharedMemoryCarveout, carveout));
  if (share == 1) return 0;
  int device = 0, most = 0, blocks = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, copies<kElements>, kThreads, 0));
  const int wanted = std::max(1, blocks / share);
  // A multiprocessor has 1 KB more than a block may ask for, and every block takes 1 KB beside what it asks for.
  const int bytes = (most + 1024) / wanted / 128 * 128 - 1024;
  STD_CUDA_CHECK(cudaFuncSetAttribute(copies<kElements>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  return bytes;
}

template <int kElements>
void copy(Tensor y, const Tensor x, int64_t share) {
  check_rank(x, "ilp: x", 1);
  check_sizes(y, "ilp: y", {x.size(0)});
  check_contiguous(x, "ilp: x");
  check_contiguous(y, "ilp: y");
  STD_TORCH_CHECK(share >= 1, "ilp: share must be at least 1, got ", share);
  const int n = to_int(x.size(0), "ilp: x"), of_block = kThreads * kElements;
  const float* from = input<float>(x, "ilp: x");
  float* to = output<float>(y, "ilp: y");
  if (n == 0) return;
  const int shared = shared_for<kElements>(int(std::min<int64_t>(share, 1024)));
  const int blocks = n / of_block + (n % of_block > 0);
  copies<kElements><<<blocks, kThreads, shared, stream_of(x)>>>(to, from, n);
  check_launch();
}

}  // namespace minfer

#define MINFER_ILP(NAME, ELEMENTS)                                                                \
  static void NAME(minfer::Tensor y, const minfer::Tensor x, int64_t share) {                     \
    minfer::copy<ELEMENTS>(y, x, share);                                                          \
  }                                                                                               \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor x, int share=1) -> ()")

MINFER_ILP(ilp_v01_one, 1)
MINFER_ILP(ilp_v02_two, 2)
MINFER_ILP(ilp_v03_four, 4)
MINFER_ILP(ilp_v04_eight, 8)
MINFER_ILP(ilp_v05_sixteen, 16)
