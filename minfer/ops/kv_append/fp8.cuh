// How a CUDA kernel of kv_append stores an element, or a vector of them: as it is, or as fp8 e4m3.
#pragma once

#include <cuda_fp8.h>

#include "cuda/vector.cuh"
#include "kv_append.h"

namespace minfer {

// Two values to two bytes, saturated and rounded to the nearest; the first in the lower byte.
__device__ inline uint32_t to_fp8(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
}

// Vector number `at` of a row: a piece of 16 bytes, or of as many bytes as it has elements.
template <typename T, typename Cache>
__device__ void store(Cache* row, int at, const Vector<T>& vector, float factor) {
  if constexpr (std::is_same_v<Cache, T>) {
    reinterpret_cast<uint4*>(row)[at] = vector.bits;
  } else {
    float values[Vector<T>::kCount];
    vector.unpack(values);
#pragma unroll
    for (float& value : values) value *= factor;
    uint32_t words[Vector<T>::kCount / 4];
#pragma unroll
    for (int i = 0; i < Vector<T>::kCount / 4; ++i)
      words[i] = to_fp8(values[4 * i], values[4 * i + 1]) | to_fp8(values[4 * i + 2], values[4 * i + 3]) << 16;
    if constexpr (Vector<T>::kCount == 8) reinterpret_cast<uint2*>(row)[at] = make_uint2(words[0], words[1]);
    else reinterpret_cast<uint32_t*>(row)[at] = words[0];
  }
}

}  // namespace minfer
