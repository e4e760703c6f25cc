// What every CUDA and C++ kernel of `divergence` is given, and how it becomes a torch op.
//
// A kernel file ends with MINFER_DIVERGENCE(NAME, apply): apply(x, steps) is one element's result. It is compiled twice:
// `steps` is the constant kNone where there are none, so that the light call has no loop at all.
#pragma once

#include <type_traits>

#include "ops/op.h"

#ifdef __CUDACC__
#define MINFER_ELEMENT __device__ inline
#else
#include <torch/csrc/stable/ops.h>
#define MINFER_ELEMENT inline
#endif

namespace minfer {

using kNone = std::integral_constant<int, 0>;

constexpr float kRate = 1.0f / 256;

// The steps of one side: y = gain y + shift, so many times. Every step waits for the one before it.
template <typename Steps>
MINFER_ELEMENT float steps_of(float y, float gain, float shift, Steps steps) {
#ifdef __CUDACC__
#pragma unroll 16
#endif
  for (int i = 0; i < int(steps); ++i) y = gain * y + shift;
  return y;
}

#ifdef __CUDACC__
constexpr int kThreads = 256;

template <auto kApply, typename Steps>
__global__ void __launch_bounds__(kThreads) elements(float* y, const float* x, int n, Steps steps) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < n) y[i] = kApply(x[i], steps);
}
#endif

template <auto kLight, auto kHeavy>
void each(const Tensor& y, const Tensor& x, int64_t steps) {
  check_rank(x, "divergence: x", 1);
  check_sizes(y, "divergence: y", {x.size(0)});
  check_contiguous(x, "divergence: x");
  check_contiguous(y, "divergence: y");
  const int n = to_int(x.size(0), "divergence: x"), count = to_int(steps, "divergence: steps");
  const float* from = input<float>(x, "divergence: x");
  float* to = output<float>(y, "divergence: y");
  if (n == 0) return;
#ifdef __CUDACC__
  const int blocks = n / kThreads + (n % kThreads > 0);
  if (count == 0) elements<kLight><<<blocks, kThreads, 0, stream_of(x)>>>(to, from, n, kNone{});
  else elements<kHeavy><<<blocks, kThreads, 0, stream_of(x)>>>(to, from, n, count);
#else
  torch::stable::parallel_for(0, n, 4096, [&](int64_t begin, int64_t end) {
    if (count == 0)
      for (int64_t i = begin; i < end; ++i) to[i] = kLight(from[i], kNone{});
    else
      for (int64_t i = begin; i < end; ++i) to[i] = kHeavy(from[i], count);
  });
#endif
  check_launch();
}

}  // namespace minfer

#define MINFER_DIVERGENCE(NAME, APPLY)                                                 \
  static void NAME(minfer::Tensor y, const minfer::Tensor x, int64_t steps) {          \
    minfer::each<APPLY<minfer::kNone>, APPLY<int>>(y, x, steps);                       \
  }                                                                                    \
  MINFER_OP(NAME, "(Tensor(a!) y, Tensor x, int steps=0) -> ()")
