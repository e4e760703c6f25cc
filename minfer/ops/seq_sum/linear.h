// A sequence summed up once on a CPU, for any length or for one that is compiled in.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "ops/halves.h"
#include "seq_sum.h"

namespace minfer {

constexpr int kParts = 32;  // four vectors of 8 floats: as many additions as are in flight at once

template <typename T>
[[gnu::always_inline]] inline float sum_of(const T* x, int length) {
  float parts[kParts] = {};
  int i = 0;
  for (; i + kParts <= length; i += kParts)
    for (int j = 0; j < kParts; ++j) parts[j] += widen(x[i + j]);
  for (int j = 0; i + j < length; ++j) parts[j] += widen(x[i + j]);
  for (int width = kParts / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) parts[j] += parts[j + width];
  return parts[0];
}

template <typename T>
[[gnu::always_inline]] inline void write_sum(const Sequence<T>& s, int length) {
  const T sum = narrow<T>(sum_of(s.x, length));
  std::fill_n(s.y, length, sum);
}

// A sequence of kLength elements takes loops whose bounds the compiler knows; all others are computed as well. 0: none.
template <int kLength, typename T>
void launch_linear(const SeqSum<T>& p) {
  const int64_t sequences = 1 + 16384 / std::max(1, p.packed ? p.longest / std::max(1, p.batch) : p.longest);
  torch::stable::parallel_for(0, p.count(), sequences, [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      const Sequence<T> s = p.sequence(static_cast<int>(number));
      if (kLength > 0 && s.length == kLength) write_sum(s, kLength);
      else write_sum(s, s.length);
      std::fill_n(s.y + s.length, s.room - s.length, T(0.0f));
    }
  });
}

}  // namespace minfer
