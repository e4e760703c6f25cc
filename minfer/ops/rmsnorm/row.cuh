// A row of rmsnorm in 16-byte pieces that the threads of a block share, and its sum.
#pragma once

#include "rmsnorm.h"

namespace minfer {

__device__ inline float2 to_floats(__half2 pair) { return __half22float2(pair); }
__device__ inline float2 to_floats(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ inline void round_to(__half2& pair, float a, float b) { pair = __floats2half2_rn(a, b); }
__device__ inline void round_to(__nv_bfloat162& pair, float a, float b) { pair = __floats2bfloat162_rn(a, b); }

// 16 bytes of a row, kept as they are in memory: half as many registers as their values in fp32.
template <typename T>
struct Vector {
  using Pair = std::conditional_t<std::is_same_v<T, Half>, __half2, __nv_bfloat162>;
  static constexpr int kCount = 16 / sizeof(T);
  uint4 bits{};

  __device__ Vector() {}
  __device__ explicit Vector(uint4 bits) : bits(bits) {}

  __device__ Vector(const float (&values)[kCount]) {
    uint32_t* words = &bits.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kCount == 4) words[i] = __float_as_uint(values[i]);
      else round_to(reinterpret_cast<Pair&>(words[i]), values[2 * i], values[2 * i + 1]);
    }
  }

  __device__ void unpack(float (&values)[kCount]) const {
    const uint32_t* words = &bits.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kCount == 4) {
        values[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = to_floats(reinterpret_cast<const Pair&>(words[i]));
        values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
      }
    }
  }

  // From here on the compiler knows the bits alone. Of itself it would keep the values of half types as it has unpacked
  // them, in twice the registers, from the sum to the product.
  __device__ void stay_packed() { asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w)); }

  __device__ float squares() const {
    float values[kCount], sum = 0.0f;
    unpack(values);
#pragma unroll
    for (float value : values) sum += value * value;
    return sum;
  }

  // value * scale * weight of each element, rounded once.
  __device__ Vector scaled(float scale, const Vector& weight) const {
    float values[kCount], weights[kCount];
    unpack(values), weight.unpack(weights);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = values[i] * scale * weights[i];
    return Vector(values);
  }
};

// The sum of a value over the threads of a row, which are those of threadIdx.y, whole warps; each of them is given it.
// Every thread of the block calls this, once for each array `partial`, which has one element a warp.
__device__ inline float sum_of_row(float value, float* partial) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  const int warps = blockDim.x / 32;
  if (warps == 1) return value;
  const int lane = threadIdx.x % 32, first = threadIdx.y * warps;
  if (lane == 0) partial[first + threadIdx.x / 32] = value;
  __syncthreads();
  const int span = 1 << (32 - __clz(warps - 1));  // the power of two that has room for all
  const int from = lane & (span - 1);
  value = from < warps ? partial[first + from] : 0.0f;
  for (int mask = span / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

}  // namespace minfer
