// The maximum of logits and the sum of their exponentials in one pass (Milakov and Gimelshein, Online normalizer calculation
// for softmax, 2018), and what a softmax kernel does with 16 bytes of a row.
#pragma once

#include "cuda/exp2.cuh"
#include "cuda/vector.cuh"
#include "softmax.h"

namespace minfer {

// What exponents are relative to: the maximum, or zero where all logits are -inf, whose difference would be NaN.
__device__ inline float base_of(float max) { return max == -INFINITY ? 0.0f : max; }

// exp(logit - base). The difference comes first: rounding a product of two large logits would not cancel.
__device__ inline float power(float logit, float base) { return exp2_approx((logit - base) * 1.44269504f); }

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
  __syncthreads();  //@ maxima_there
  const int span = 1 << (32 - __clz(warps - 1));  // the next power of two from `warps` on
  const int from = lane & (span - 1);
  const float2 other = from < warps ? partial[first + from] : float2{-INFINITY, 0.0f};
  return reduce_lanes({other.x, other.y}, span);
}

// A vector whose elements from `count` on, which do not count, are -inf.
template <typename T>
__device__ Vector<T> cut(const Vector<T>& x, int count) {
  float values[Vector<T>::kCount];
  x.unpack(values);
#pragma unroll
  for (int i = 0; i < Vector<T>::kCount; ++i) values[i] = i < count ? values[i] : -INFINITY;
  return Vector<T>(values);
}

// A thread's vectors of a row, the i-th of which is at first + i * step, with -inf from element `valid` on. Those behind
// vector `end` are another block's, and -inf, too.
template <typename T, int kVectors>
__device__ void load_logits(Vector<T> (&to)[kVectors], const T* row, int first, int step, int valid, int end) {
  constexpr int kCount = Vector<T>::kCount;
  const int used = min(valid, end * kCount);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = first + i * step;
    to[i].bits = at * kCount < used ? reinterpret_cast<const uint4*>(row)[at] : uint4{};
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int count = used - (first + i * step) * kCount;
    if (count < kCount) to[i] = cut(to[i], count);
  }
}

// The logits of vector `at` of a row: with the bias.
template <typename T>
__device__ void unpack_logits(float (&logits)[Vector<T>::kCount], const Vector<T>& x, const Softmax<T>& p, int at) {
  constexpr int kCount = Vector<T>::kCount;
  x.unpack(logits);
  if (p.bias && at * kCount < p.n) {
    float bias[kCount];
    Vector<T>(reinterpret_cast<const uint4*>(p.bias)[at]).unpack(bias);
#pragma unroll
    for (int i = 0; i < kCount; ++i) logits[i] += bias[i];
  }
}

// Of a thread's vectors of a row, the i-th of which is at first + i * step. A group of logits is scaled at once: a first pass
// for the maximum of all would need no scaling, but ptxas keeps the logits for the second, and spills them.
template <typename T, int kVectors>
__device__ Online online(const Vector<T> (&x)[kVectors], const Softmax<T>& p, int first, int step) {
  float logits[Vector<T>::kCount];
  Online found;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    unpack_logits(logits, x[i], p, first + i * step);
    found.add(logits);
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

// Writes the result of a thread's vectors, those in front of vector `end`.
template <typename T, int kVectors>
__device__ void write_row(T* y, Vector<T> (&x)[kVectors], const Softmax<T>& p, int first, int step, int end,
                          const Online& row) {
  const float base = base_of(row.max), scale = 1.0f / row.sum;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = first + i * step;
    float logits[Vector<T>::kCount];
    x[i].stay_packed();
    unpack_logits(logits, x[i], p, at);
    if (at < end) reinterpret_cast<uint4*>(y)[at] = probabilities<T>(logits, base, scale).bits;
  }
}

}  // namespace minfer
