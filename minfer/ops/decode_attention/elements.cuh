// Elements of a cache as fp32, one and 16 bytes at a time.
#pragma once

#include "cuda/fp8.cuh"
#include "cuda/vector.cuh"
#include "decode_attention.h"

namespace minfer {

__device__ inline float to_float(Half x) { return __half2float(x); }
__device__ inline float to_float(BFloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(Float8E4M3 x) {
  const uint32_t pair = e4m3_to_halves(static_cast<uint8_t>(x));
  return to_floats(reinterpret_cast<const __half2&>(pair)).x;
}

// 16 bytes of a row: 8 elements of a half type, 16 of fp8.
template <typename KV>
__device__ void unpack(uint4 bits, float (&values)[16 / sizeof(KV)]) {
  if constexpr (sizeof(KV) == 2) {
    Vector<KV>(bits).unpack(values);
  } else {
    const uint32_t* words = &bits.x;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t pair = e4m3_to_halves(words[i / 2] >> i % 2 * 16);
      const float2 two = to_floats(reinterpret_cast<const __half2&>(pair));
      values[2 * i] = two.x, values[2 * i + 1] = two.y;
    }
  }
}

}  // namespace minfer
