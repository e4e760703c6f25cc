// What kernels of RMSNorm do with 16 bytes of a row.
#pragma once

#include "cuda/vector.cuh"

namespace minfer {

template <typename T>
__device__ float squares(const Vector<T>& x) {
  float values[Vector<T>::kCount], sum = 0.0f;
  x.unpack(values);
#pragma unroll
  for (float value : values) sum += value * value;
  return sum;
}

// x * scale * weight of each element, rounded once.
template <typename T>
__device__ Vector<T> scaled(const Vector<T>& x, float scale, const Vector<T>& weight) {
  float values[Vector<T>::kCount], weights[Vector<T>::kCount];
  x.unpack(values), weight.unpack(weights);
#pragma unroll
  for (int i = 0; i < Vector<T>::kCount; ++i) values[i] = values[i] * scale * weights[i];
  return Vector<T>(values);
}

}  // namespace minfer
