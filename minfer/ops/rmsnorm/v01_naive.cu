// v01_naive: one block a row, one element a load, and two passes over the row.
// Idea: the definition, nothing else; neighbouring threads take neighbouring elements.
// Expected: half of the memory's speed or less: a warp asks for 64 bytes at once of a half type, so that few are in
// flight, and the second pass, though it finds the row in the cache, waits anew.
// Measured (H200, bfloat16, tokens=655360, hidden=128): 412.7 GB/s cold; 49.5 % of torch.
#include "rmsnorm.h"

namespace minfer {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) naive(RmsNorm<T> p) {
  __shared__ float partial[kThreads];
  const T* x = p.x + blockIdx.x * p.x_stride;
  T* y = p.y + blockIdx.x * p.y_stride;

  float sum = 0.0f;
  for (int i = threadIdx.x; i < p.hidden; i += kThreads) sum += float(x[i]) * float(x[i]);
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }

  const float scale = rsqrtf(partial[0] * p.share + p.eps);
  for (int i = threadIdx.x; i < p.hidden; i += kThreads) y[i] = T(float(x[i]) * scale * float(p.weight[i]));
}

template <typename T>
void launch(const RmsNorm<T>& p) {
  naive<<<p.tokens, kThreads, 0, p.stream>>>(p);
}

}  // namespace minfer

MINFER_RMSNORM(rmsnorm_v01_naive, minfer::launch)
