// Values of fp32 as fp8 e4m3 or int8, rounded to the nearest and saturated, one and several at a time.
#pragma once

#include <cuda_fp8.h>

#include "ops/row_quant.h"

namespace minfer {

__device__ inline uint32_t to_byte(float value, int8_t) { return uint8_t(int8_t(fminf(fmaxf(rintf(value), -127.0f), 127.0f))); }
__device__ inline uint32_t to_byte(float value, Float8E4M3) { return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3); }

// Stores piece number `at` of a row: kCount bytes, which is 1, 4 or 8.
template <typename Y, int kCount>
__device__ void store_bytes(Y* row, int at, const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    reinterpret_cast<uint8_t*>(row)[at] = uint8_t(to_byte(values[0], Y{}));
  } else {
    uint32_t words[kCount / 4];
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      words[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i] |= to_byte(values[4 * i + j], Y{}) << 8 * j;
    }
    if constexpr (kCount == 8) reinterpret_cast<uint2*>(row)[at] = make_uint2(words[0], words[1]);
    else reinterpret_cast<uint32_t*>(row)[at] = words[0];
  }
}

}  // namespace minfer
