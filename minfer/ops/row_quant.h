// A row of values as bytes, fp8 e4m3 or int8, and a scale of the row: value / scale, where the largest magnitude becomes the
// largest of the byte's.
#pragma once

#include "ops/op.h"

#ifndef __CUDACC__
#include <torch/headeronly/util/Float8_e4m3fn.h>

#include <algorithm>
#include <cmath>
#endif

namespace minfer {

template <typename Y>
constexpr float kMostOfByte = std::is_same_v<Y, int8_t> ? 127.0f : 448.0f;

// What a value is multiplied by to become its byte; 0 for a row of zeros.
template <typename Y>
MINFER_EITHER float factor_of_row(float largest) {
  return largest > 0.0f ? kMostOfByte<Y> / largest : 0.0f;
}

#ifndef __CUDACC__
inline void to_byte(int8_t& to, float value) {
  to = static_cast<int8_t>(std::clamp(std::nearbyint(value), -127.0f, 127.0f));
}
inline void to_byte(Float8E4M3& to, float value) {
  const float kept = std::isnan(value) ? value : std::clamp(value, -448.0f, 448.0f);
  to = static_cast<Float8E4M3>(torch::headeronly::Float8_e4m3fn(kept).x);
}
#endif

}  // namespace minfer
