// cpu_vectors: the sum in 32 parts, so that the compiler makes vectors of it; threads over the rows.
// Idea: additions that do not wait for each other fill the vector units, and with them the conversions of half types: a
// half is shifted into place as an integer and scaled by a power of two, for which there are vector instructions.
// Expected: three times cpu_naive or more, and the speed of memory with a few cores.
#include <torch/csrc/stable/ops.h>

#include <bit>
#include <cmath>

#include "rmsnorm.h"

namespace minfer {

constexpr int kParts = 32;  // four vectors of 8 floats: as many additions as are in flight at once

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

template <typename T>
float sum_of_squares(const T* x, int count) {
  float parts[kParts] = {};
  int i = 0;
  for (; i + kParts <= count; i += kParts)
    for (int j = 0; j < kParts; ++j) parts[j] += widen(x[i + j]) * widen(x[i + j]);
  for (int j = 0; i + j < count; ++j) parts[j] += widen(x[i + j]) * widen(x[i + j]);
  for (int width = kParts / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) parts[j] += parts[j + width];
  return parts[0];
}

template <typename T>
void launch(const RmsNorm<T>& p) {
  const int64_t rows = 1 + 16384 / p.hidden;  // of a task, at least: a thread has more to do than to be told of it
  torch::stable::parallel_for(0, p.tokens, rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = p.x + row * p.x_stride;
      T* __restrict__ y = p.y + row * p.y_stride;
      const float scale = 1.0f / std::sqrt(sum_of_squares(x, p.hidden) * p.share + p.eps);
      for (int i = 0; i < p.hidden; ++i) y[i] = narrow<T>(widen(x[i]) * scale * widen(p.weight[i]));
    }
  });
}

}  // namespace minfer

MINFER_RMSNORM(rmsnorm_cpu_vectors, minfer::launch)
