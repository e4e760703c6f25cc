// Converts fp8 e4m3 to operands of products.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace minfer {

// Converts two e4m3 values, the first in the lowest byte of `two`, to halves, which is exact. The upper half of `two` is not
// used. One instruction from sm_89 on.
__device__ inline uint32_t e4m3_to_halves(uint32_t two) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two & 0xffff), __NV_E4M3);
  return pair.x | uint32_t(pair.y) << 16;
}

}  // namespace minfer
