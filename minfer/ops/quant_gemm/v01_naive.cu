// v01_naive: a thread for each element of y, which decodes its row of W for itself.
// Idea: the definition in one kernel. Neighbouring threads have neighbouring columns of y and so different rows of W: a warp's
// load of a byte touches 32 rows.
// Expected: far below the memory's speed at m = 1, because each load asks for one byte and brings a sector of 32. With more
// rows of x it is worse, because W is decoded again for each.
// Measured (H200, bfloat16, int4_g128, float32, m=16, n=4096, k=4096): 0.4652 TFLOP/s cold.
#include "quant_gemm.h"

namespace minfer {

constexpr int kThreads = 128;

template <typename X>
__device__ float value_of(X x) {
  if constexpr (std::is_same_v<X, uint8_t>) return from_e4m3(x);
  else return float(x);
}

template <typename F, typename T>
__global__ void __launch_bounds__(kThreads) naive(Product<F, T> p) {
  const int col = blockIdx.x * kThreads + threadIdx.x;
  if (col >= p.n) return;
  for (int64_t row = blockIdx.y; row < p.m; row += gridDim.y) {
    float sum = 0.0f;
    for (int k = 0; k < p.k; k += 8) {
      float values[8];
      eight_weights<F>(p.weights, col, k, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += value_of(p.x[row * p.k + k + i]) * values[i];
    }
    if (p.x_scales) sum *= p.x_scales[row];
    p.y[row * p.n + col] = T(sum);
  }
}

template <typename F, typename T>
void launch(const Product<F, T>& p) {
  naive<F, T><<<dim3((p.n + kThreads - 1) / kThreads, min(p.m, 65535)), kThreads, 0, p.stream>>>(p);
}

}  // namespace minfer

MINFER_QUANT_GEMM_OF(quant_gemm_v01_naive, true, true, minfer::launch)
