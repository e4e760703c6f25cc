// v02_vectors: 16-byte loads and stores, and each row read once: a thread keeps its pieces of it, packed, from the mean
// to the result.
// Idea: as rmsnorm's v02_vectors, with a second sum over the registers, of squared differences from the mean, so that the
// block meets twice. Weight and bias are loaded with the row.
// Expected: rmsnorm's speed for many rows; for few, one barrier more, about 0.1 us. Rows of more than 32768 elements of a half
// type (16384 of fp32) are read three times, from the L2 where it keeps them.
// Measured (H100 80GB HBM3, bfloat16, tokens=4096, hidden=16384): 2861 GB/s cold, 2789 steady; 157.9 % and 158.3 % of torch.
#include "cuda/rows.cuh"
#include "layernorm.h"

namespace minfer {

template <typename T>
__device__ float sum_of(const Vector<T>& x) {
  float values[Vector<T>::kCount], sum = 0.0f;
  x.unpack(values);
#pragma unroll
  for (float value : values) sum += value;
  return sum;
}

template <typename T>
__device__ float squares_from(const Vector<T>& x, float mean) {
  float values[Vector<T>::kCount], sum = 0.0f;
  x.unpack(values);
#pragma unroll
  for (float value : values) sum += (value - mean) * (value - mean);
  return sum;
}

template <typename T>
__device__ Vector<T> normalised(const Vector<T>& x, float mean, float scale, const Vector<T>& weight,
                                const Vector<T>& bias) {
  float values[Vector<T>::kCount], weights[Vector<T>::kCount], shifts[Vector<T>::kCount];
  x.unpack(values), weight.unpack(weights), bias.unpack(shifts);
#pragma unroll
  for (int i = 0; i < Vector<T>::kCount; ++i) values[i] = (values[i] - mean) * scale * weights[i] + shifts[i];
  return Vector<T>(values);
}

template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostRowThreads) in_registers(LayerNorm<T> p, int vectors) {
  __shared__ float of_mean[kMostRowThreads / 32];
  __shared__ float of_variance[kMostRowThreads / 32];
  const int row = blockIdx.x * blockDim.y + threadIdx.y, mine = row < p.tokens ? vectors : 0;
  // With few rows, and one vector a thread, all loads are under way at once. With many, an SM holds more rows where weight and
  // bias come from the L1 at the end: of two vectors each they cost 24 registers of 64.
  constexpr bool kEarly = kVectors == 1;
  Vector<T> x[kVectors], weight[kVectors], bias[kVectors];
  load_row(x, p.x + row * p.x_stride, mine);
  if constexpr (kEarly) load_shared_row(weight, p.weight, vectors), load_shared_row(bias, p.bias, vectors);
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) sum += sum_of(x[i]);
  const float mean = reduce_row(sum, of_mean) * p.share;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    x[i].stay_packed();
    //@ variance
    if (threadIdx.x + i * blockDim.x < mine) squares += squares_from(x[i], mean);  // beyond the row is not the mean
  }
  const float scale = rsqrtf(reduce_row(squares, of_variance) * p.share + p.eps);  //@ of_variance
  uint4* y = reinterpret_cast<uint4*>(p.y + row * p.y_stride);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    x[i].stay_packed();
    if (at >= mine) continue;
    if constexpr (kEarly) {
      weight[i].stay_packed(), bias[i].stay_packed();
    } else {
      weight[i].bits = reinterpret_cast<const uint4*>(p.weight)[at];
      bias[i].bits = reinterpret_cast<const uint4*>(p.bias)[at];
    }
    y[at] = normalised(x[i], mean, scale, weight[i], bias[i]).bits;
  }
}

template <typename T>
__global__ void __launch_bounds__(kMostRowThreads) three_passes(LayerNorm<T> p, int vectors) {
  __shared__ float of_mean[kMostRowThreads / 32];
  __shared__ float of_variance[kMostRowThreads / 32];
  const uint4* x = reinterpret_cast<const uint4*>(p.x + blockIdx.x * p.x_stride);
  const uint4* weight = reinterpret_cast<const uint4*>(p.weight);
  const uint4* bias = reinterpret_cast<const uint4*>(p.bias);
  uint4* y = reinterpret_cast<uint4*>(p.y + blockIdx.x * p.y_stride);

  float sum = 0.0f, squares = 0.0f;
#pragma unroll 4
  for (int at = threadIdx.x; at < vectors; at += kMostRowThreads) sum += sum_of(Vector<T>(x[at]));
  const float mean = reduce_row(sum, of_mean) * p.share;
#pragma unroll 4
  for (int at = threadIdx.x; at < vectors; at += kMostRowThreads) squares += squares_from(Vector<T>(x[at]), mean);
  const float scale = rsqrtf(reduce_row(squares, of_variance) * p.share + p.eps);  //@ of_variance_long
#pragma unroll 4
  for (int at = threadIdx.x; at < vectors; at += kMostRowThreads)
    y[at] = normalised(Vector<T>(x[at]), mean, scale, Vector<T>(weight[at]), Vector<T>(bias[at])).bits;
}

template <typename T>
void launch(const LayerNorm<T>& p) {
  require_vectors(p);
  const int vectors = p.hidden / Vector<T>::kCount;
  const bool done = in_row_registers(p.tokens, vectors, multiprocessors(), [&]<int kVectors>(int blocks, dim3 threads) {
    in_registers<T, kVectors><<<blocks, threads, 0, p.stream>>>(p, vectors);
  });
  if (!done) three_passes<T><<<p.tokens, kMostRowThreads, 0, p.stream>>>(p, vectors);
}

}  // namespace minfer

MINFER_LAYERNORM(layernorm_v02_vectors, minfer::launch)
