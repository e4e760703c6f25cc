// Half types as integers, so that the compiler makes vectors of their conversions.
#pragma once

#include <bit>
#include <cstdint>

#include "ops/op.h"

namespace minfer {

inline float widen(float value) { return value; }
inline float widen(BFloat16 value) { return std::bit_cast<float>(uint32_t{value.x} << 16); }
inline float widen(Half value) {
  const uint32_t bits = value.x, magnitude = (bits & 0x7fff) << 13;
  // An exponent of 5 bits in the place of one of 8 stands for a number 2^112 times smaller, denormals included.
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t special = magnitude >= 0x7c00u << 13 ? 0x7f800000u : 0u;  // infinity and NaN
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special | (bits & 0x8000) << 16);
}

// The value rounded to the nearest T, ties to even.
template <typename T>
T narrow(float value) {
  return static_cast<T>(value);
}
template <>
inline Half narrow(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff;
  const uint32_t normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112u << 10);
  // Added to 0.5, whose last bit is 2^-24, a number is rounded to the multiples of it: the denormals of a half.
  const float moved = std::bit_cast<float>(magnitude) + 0.5f;
  const uint32_t denormal = std::bit_cast<uint32_t>(moved) - std::bit_cast<uint32_t>(0.5f);
  uint32_t half = magnitude < 113u << 23 ? denormal : normal;
  half = magnitude >= 0x477ff000 ? 0x7c00 : half;  // from 65520 on: infinity
  half = magnitude > 0x7f800000 ? 0x7e00 : half;   // NaN
  return Half(static_cast<uint16_t>(half | (bits >> 16 & 0x8000)), Half::from_bits());
}

}  // namespace minfer
