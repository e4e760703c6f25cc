// Keys and values in fp8 on their way to products of T.
#pragma once

#include "cuda/fp8.cuh"
#include "cuda/vector.cuh"

namespace minfer {

// Two e4m3 numbers, in the lower half of `two`, as T, which is exact.
template <typename T>
__device__ uint32_t widened(uint32_t two) {
  const uint32_t halves = e4m3_to_halves(two);
  if constexpr (std::is_same_v<T, Half>) return halves;
  using Pair = typename Vector<T>::Pair;
  const float2 values = to_floats(reinterpret_cast<const __half2&>(halves));
  uint32_t pair;
  round_to(reinterpret_cast<Pair&>(pair), values.x, values.y);
  return pair;
}

// Eight numbers.
template <typename T>
__device__ uint4 widened_eight(uint32_t first, uint32_t second) {
  return {widened<T>(first), widened<T>(first >> 16), widened<T>(second), widened<T>(second >> 16)};
}

}  // namespace minfer
