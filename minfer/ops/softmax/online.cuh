// The maximum of logits and the sum of their powers in one pass (Milakov and Gimelshein, Online normalizer calculation
// for softmax, 2018), and what a softmax kernel does with 16 bytes of a row.
#pragma once

#include "cuda/vector.cuh"
#include "softmax.h"

namespace minfer {

// What exponents are relative to: the maximum, or zero where all logits are -inf, whose difference would be NaN.
__device__ inline float base_of(float max) { return max == -INFINITY ? 0.0f : max; }

// exp(logit - base). The difference comes first: rounding a product of two large logits would not cancel.
__device__ inline float power(float logit, float base) { return exp2f((logit - base) * 1.44269504f); }

struct Online {
  float max = -INFINITY, sum = 0.0f;  // of exp(logit - base_of(max)); NaN once a logit was

  // Takes in a group of logits at once, so that the sum is scaled once for all of them.
  template <int kCount>
  __device__ void add(const float (&logits)[kCount]) {
    float highest = max;
#pragma unroll
    for (float logit : logits) highest = fmaxf(highest, logit);
    const float base = base_of(highest);
    sum *= power(max, base), max = highest;
#pragma unroll
    for (float logit : logits) sum += power(logit, base);
  }
};

// Of all lanes whose numbers differ in bits below `span`, a power of two, given to each of them.
__device__ inline Online reduce_lanes(Online mine, int span = 32) {
  float highest = mine.max;
  for (int mask = span / 2; mask > 0; mask /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, mask));
  float sum = mine.sum * power(mine.max, base_of(highest));
  for (int mask = span / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
  return {highest, sum};
}

// Of the threads of a row, given to each of them, with one barrier: as `reduce_row` of cuda/vector.cuh, of which `partial`
// is the same.
__device__ inline Online reduce_row(Online mine, float2* partial) {
  mine = reduce_lanes(mine);
  const int warps = blockDim.x / 32;
  if (warps == 1) return mine;
  const int lane = threadIdx.x % 32, first = threadIdx.y * warps;
  if (lane == 0) partial[first + threadIdx.x / 32] = float2{mine.max, mine.sum};
  __syncthreads();
  const int span = 1 << (32 - __clz(warps - 1));  // the next power of two from `warps` on
  const int from = lane & (span - 1);
  const float2 other = from < warps ? partial[first + from] : float2{-INFINITY, 0.0f};
  return reduce_lanes({other.x, other.y}, span);
}

// The logits of a vector, element `first` of its row and on: with the bias, and -inf from element `valid` on.
template <typename T>
__device__ void unpack_logits(float (&logits)[Vector<T>::kCount], const Vector<T>& x, const Softmax<T>& p, int first,
                              int valid) {
  constexpr int kCount = Vector<T>::kCount;
  x.unpack(logits);
  if (p.bias && first < valid) {
    float bias[kCount];
    Vector<T>(*reinterpret_cast<const uint4*>(p.bias + first)).unpack(bias);
#pragma unroll
    for (int i = 0; i < kCount; ++i) logits[i] += bias[i];
  }
  if (first + kCount > valid) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) logits[i] = first + i < valid ? logits[i] : -INFINITY;
  }
}

// Of a thread's vectors of a row, the i-th of which is at first + i * step: one maximum for all of them, then the sum, so
// that nothing is scaled. It unpacks them twice, which takes fewer registers than to keep the logits.
template <typename T, int kVectors>
__device__ Online online(Vector<T> (&x)[kVectors], const Softmax<T>& p, int first, int step, int valid) {
  constexpr int kCount = Vector<T>::kCount;
  float logits[kCount];
  Online found;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    unpack_logits(logits, x[i], p, (first + i * step) * kCount, valid);
#pragma unroll
    for (float logit : logits) found.max = fmaxf(found.max, logit);
  }
  const float base = base_of(found.max);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    x[i].stay_packed();
    unpack_logits(logits, x[i], p, (first + i * step) * kCount, valid);
#pragma unroll
    for (float logit : logits) found.sum += power(logit, base);
  }
  return found;
}

// What the row makes of a vector's logits.
template <typename T>
__device__ Vector<T> probabilities(float (&logits)[Vector<T>::kCount], float base, float scale) {
#pragma unroll
  for (float& logit : logits) logit = power(logit, base) * scale;
  return Vector<T>(logits);
}

}  // namespace minfer
