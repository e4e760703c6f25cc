// 16 bytes of a tensor as one load or store, and reductions over the threads of a row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace minfer {

__device__ inline float2 to_floats(__half2 pair) { return __half22float2(pair); }
__device__ inline float2 to_floats(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ inline void round_to(__half2& pair, float a, float b) { pair = __floats2half2_rn(a, b); }
__device__ inline void round_to(__nv_bfloat162& pair, float a, float b) { pair = __floats2bfloat162_rn(a, b); }

// kCount elements of T (float, __half or __nv_bfloat16) in their own type: a half type takes half as many registers as its
// values in fp32.
template <typename T>
struct Vector {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  static constexpr int kCount = 16 / sizeof(T);
  uint4 bits{};

  __device__ Vector() {}
  __device__ explicit Vector(uint4 bits) : bits(bits) {}

  // Rounds to the nearest, ties to even.
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

  // Makes the compiler drop the unpacked values and keep the bits. Without this it keeps the fp32 values of half types from
  // their first use to their last, in twice the registers.
  __device__ void stay_packed() { asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w)); }
};

struct Sum {
  static constexpr float kNeutral = 0.0f;
  __device__ float operator()(float a, float b) const { return a + b; }
};

struct Max {
  static constexpr float kNeutral = -INFINITY;
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// The sum, or maximum, of a value over the threads of a row, returned to each of them. The threads of a row are whole warps
// with the same threadIdx.y. Every thread of the block must call this. `partial` has one element for each warp of the block; a
// second call needs another array, or a barrier before it.
template <typename Combine = Sum>
__device__ inline float reduce_row(float value, float* partial, Combine combine = {}) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = combine(value, __shfl_xor_sync(0xffffffff, value, mask));
  const int warps = blockDim.x / 32;
  if (warps == 1) return value;
  const int lane = threadIdx.x % 32, first = threadIdx.y * warps;
  if (lane == 0) partial[first + threadIdx.x / 32] = value;
  __syncthreads();  //@ sums_there
  const int span = 1 << (32 - __clz(warps - 1));  // the next power of two from `warps` on
  const int from = lane & (span - 1);
  value = from < warps ? partial[first + from] : Combine::kNeutral;
  for (int mask = span / 2; mask > 0; mask /= 2) value = combine(value, __shfl_xor_sync(0xffffffff, value, mask));
  return value;
}

}  // namespace minfer
