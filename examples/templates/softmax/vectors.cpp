// vectors: maxima and sums in kParts parts, and exponentials in strips of kStrip elements.
// Idea: examples/generate_kernels.py changes the constants. How many parts fit into the registers, how long a strip stays in the
// first cache, and how many elements are worth a thread, depends on the processor.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "ops/halves.h"
#include "softmax.h"

namespace minfer {
namespace {  // so that two kernels of this template in one process share nothing

constexpr int kParts = 32;    // sums at a time
constexpr int kStrip = 1024;  // elements of a row
constexpr int kTask = 16384;  // elements of a thread's task, at least

// exp(x) for x <= 0, and NaN for NaN: the Taylor series of 2^r for |r| <= 1/2, whose ninth term is below 2^-27.
inline float power(float x) {
  const float scaled = x * 1.44269504f;
  const float clamped = scaled < -126.0f ? -126.0f : scaled;  // NaN stays
  const float moved = clamped + 0x1.8p23f;                    // rounds to a whole number, in the lowest bits
  const float r = (clamped - (moved - 0x1.8p23f)) * 0.693147181f;
  float sum = 1.0f / 5040;
  sum = sum * r + 1.0f / 720;
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  const float whole = std::bit_cast<float>((std::bit_cast<uint32_t>(moved) << 23) + 0x3f800000u);
  return scaled < -126.0f ? 0.0f : sum * whole;
}

// Combines f(0), ..., f(count - 1), in any order.
template <typename F, typename Combine>
float reduce(int count, float neutral, F f, Combine combine) {
  float parts[kParts];
  std::fill_n(parts, kParts, neutral);
  int i = 0;
  for (; i + kParts <= count; i += kParts)
    for (int j = 0; j < kParts; ++j) parts[j] = combine(parts[j], f(i + j));
  for (int j = 0; i + j < count; ++j) parts[j] = combine(parts[j], f(i + j));
  for (int j = 1; j < kParts; ++j) parts[0] = combine(parts[0], parts[j]);
  return parts[0];
}

template <typename T>
void normalise(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int valid, int n, float* __restrict__ buffer) {
  const auto larger = [](float a, float b) { return a > b ? a : b; };
  float max = -INFINITY, sum = 0.0f;
  for (int first = 0; first < valid; first += kStrip) {
    float* __restrict__ strip = buffer + first;
    const int count = std::min(kStrip, valid - first);
    for (int i = 0; i < count; ++i) strip[i] = widen(x[first + i]);
    if (bias)
      for (int i = 0; i < count; ++i) strip[i] += widen(bias[first + i]);
    max = larger(max, reduce(count, -INFINITY, [=](int i) { return strip[i]; }, larger));
  }
  const float base = max == -INFINITY ? 0.0f : max;  // all -inf: not NaN yet, but from the quotient on
  for (int first = 0; first < valid; first += kStrip) {
    float* __restrict__ strip = buffer + first;
    const int count = std::min(kStrip, valid - first);
    for (int i = 0; i < count; ++i) strip[i] = power(strip[i] - base);
    sum += reduce(count, 0.0f, [=](int i) { return strip[i]; }, [](float a, float b) { return a + b; });
  }
  const float scale = 1.0f / sum;
  for (int i = 0; i < valid; ++i) y[i] = narrow<T>(buffer[i] * scale);
  for (int i = valid; i < n; ++i) y[i] = narrow<T>(0.0f);
}

template <typename T>
void launch(const Softmax<T>& p) {
  torch::stable::parallel_for(0, p.rows, 1 + kTask / p.n, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(p.n);
    for (int64_t row = begin; row < end; ++row)
      normalise(p.x + row * p.x_stride, p.bias, p.y + row * p.y_stride, p.valid(static_cast<int>(row)), p.n, buffer.data());
  });
}

}  // namespace
}  // namespace minfer

MINFER_SOFTMAX(softmax_vectors, minfer::launch)
