// vectors: maxima and sums in kMany vectors of kWidth floats, kTask elements for a thread at a time.
// Idea: examples/generate_kernels.py changes the constants. How wide a vector the processor has, and how many additions it has
// in flight, are for it to find out.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/halves.h"
#include "softmax.h"

namespace minfer {
namespace {  // so that two kernels of this template in one process share nothing

constexpr int kWidth = 8, kMany = 4;  // floats of a vector; vectors in flight
constexpr int kTask = 16384;          // elements of a thread's task, at least

constexpr int kParts = kWidth * kMany;
typedef float Vec __attribute__((vector_size(4 * kWidth), aligned(4)));
typedef int32_t Bits __attribute__((vector_size(4 * kWidth), aligned(4)));

// exp(x) for x <= 0, and NaN for NaN: the Taylor series of 2^r for |r| <= 1/2, whose ninth term is below 2^-27.
inline Vec power(Vec x) {
  const Vec scaled = x * 1.44269504f;
  const Vec clamped = scaled < -126.0f ? Vec{} - 126.0f : scaled;  // NaN stays
  const Vec moved = clamped + 0x1.8p23f;                           // rounds to a whole number, in the lowest bits
  const Vec r = (clamped - (moved - 0x1.8p23f)) * 0.693147181f;
  Vec sum = r * (1.0f / 5040) + 1.0f / 720;
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  Bits bits;
  std::memcpy(&bits, &moved, sizeof bits);
  bits = (bits << 23) + 0x3f800000;
  Vec whole;
  std::memcpy(&whole, &bits, sizeof whole);
  return scaled < -126.0f ? Vec{} : sum * whole;
}

inline Vec load(const float* x) { return *reinterpret_cast<const Vec*>(x); }

// The rows' pieces are as long as a multiple of kParts; what is beyond a row's end is -inf, whose exponential is 0.
template <typename T>
void normalise(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int valid, int n, float* buffer) {
  const int padded = (valid + kParts - 1) / kParts * kParts;
  for (int i = 0; i < valid; ++i) buffer[i] = widen(x[i]);
  if (bias)
    for (int i = 0; i < valid; ++i) buffer[i] += widen(bias[i]);
  std::fill(buffer + valid, buffer + padded, -INFINITY);
  Vec parts[kMany];
  for (int j = 0; j < kMany; ++j) parts[j] = Vec{} - INFINITY;
  for (int i = 0; i < padded; i += kParts)
#pragma GCC unroll 16
    for (int j = 0; j < kMany; ++j) {
      const Vec at = load(buffer + i + j * kWidth);
      parts[j] = parts[j] > at ? parts[j] : at;  // NaN in `at` is taken, and then lost or kept: the sum has it in any case
    }
  float max = -INFINITY;
  for (int j = 0; j < kMany; ++j)
    for (int l = 0; l < kWidth; ++l) max = std::max(max, parts[j][l]);
  const float base = max == -INFINITY ? 0.0f : max;  // all -inf: not NaN yet, but from the quotient on
  Vec sums[kMany] = {};
  for (int i = 0; i < padded; i += kParts)
#pragma GCC unroll 16
    for (int j = 0; j < kMany; ++j) {
      Vec* at = reinterpret_cast<Vec*>(buffer + i + j * kWidth);
      *at = power(*at - base);
      sums[j] += *at;
    }
  float sum = 0.0f;
  for (int j = 0; j < kMany; ++j)
    for (int l = 0; l < kWidth; ++l) sum += sums[j][l];
  const float scale = 1.0f / sum;
  for (int i = 0; i < valid; ++i) y[i] = narrow<T>(buffer[i] * scale);
  for (int i = valid; i < n; ++i) y[i] = narrow<T>(0.0f);
}

template <typename T>
void launch(const Softmax<T>& p) {
  torch::stable::parallel_for(0, p.rows, 1 + kTask / p.n, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(p.n + kParts);
    for (int64_t row = begin; row < end; ++row)
      normalise(p.x + row * p.x_stride, p.bias, p.y + row * p.y_stride, p.valid(static_cast<int>(row)), p.n, buffer.data());
  });
}

}  // namespace
}  // namespace minfer

MINFER_SOFTMAX(softmax_vectors, minfer::launch)
