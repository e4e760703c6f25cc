// v01_naive: a thread for eight weights of a row, which reads their bytes one by one.
// Idea: the definition. Blocks of 18, 34 or 210 bytes do not start at multiples of 4, so a thread that works alone can read no
// more than one or two bytes at once; eight results in a half type are one store of 16 bytes.
// Expected: at most a fifth of the memory's speed: each store takes 8 to 16 loads of a byte, and the load units split a warp's
// load of scattered bytes into several accesses.
// Measured (H200, bfloat16, q8_0, n=28672, k=4096): 895.5 GB/s cold; 276.3 % of torch.
#include "dequant.h"
#include "cuda/vector.cuh"

namespace minfer {

constexpr int kThreads = 256;

template <typename F, typename T, typename S>
__global__ void __launch_bounds__(kThreads) naive(T* y, Weights<S> weights) {
  const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (at >= weights.n * weights.k) return;
  float values[8];
  eight_weights<F>(weights, at / weights.k, int(at % weights.k), values);
#pragma unroll
  for (int i = 0; i < 8; ++i) y[at + i] = T(values[i]);
}

template <typename F, typename T, typename S>
void launch(T* y, const Weights<S>& weights, cudaStream_t stream) {
  const int64_t blocks = (weights.n * weights.k / 8 + kThreads - 1) / kThreads;
  STD_TORCH_CHECK(blocks <= INT_MAX, "dequant: y has more elements than a launch has threads for");
  naive<F, T, S><<<dim3(blocks), kThreads, 0, stream>>>(y, weights);
}

}  // namespace minfer

MINFER_DEQUANT(dequant_v01_naive)
