// Exponentials relative to a maximum, with one instruction a logit less than `power` of online.cuh.
#pragma once

#include "online.cuh"

namespace minfer {

constexpr float kLog2E = 1.44269504f;
constexpr float kLarge = 1e30f;  // the product of log2 e and a larger logit may overflow

// exp(logit - base) as one multiply-add and one power of two. The product of `base` and log2 e is rounded, by which all of them
// are off by the same factor: `factor` takes it back.
struct Exponentials {
  float base, scaled, factor;

  __device__ explicit Exponentials(float base)
      : base(base), scaled(base * kLog2E), factor(exp2_approx(fmaf(-base, kLog2E, scaled))) {}
  __device__ bool fits() const { return fabsf(base) < kLarge; }  // else `power` is to be used
  __device__ float of(float logit) const { return exp2_approx(fmaf(logit, kLog2E, -scaled)); }
};

// Takes in a group of logits, as Online::add does.
template <int kLogits>
__device__ void add(Online& to, const float (&logits)[kLogits]) {
  float highest = to.max, sum = 0.0f;
#pragma unroll
  for (float logit : logits) highest = fmaxf(highest, logit);
  const Exponentials exponentials(base_of(highest));
  if (exponentials.fits()) {
#pragma unroll
    for (float logit : logits) sum += exponentials.of(logit);
    sum *= exponentials.factor;
  } else {
#pragma unroll
    for (float logit : logits) sum += power(logit, exponentials.base);
  }
  to.sum = to.sum * power(to.max, exponentials.base) + sum, to.max = highest;
}

// What a row makes of logits.
struct Quotients {
  Exponentials exponentials;
  float scale, with_factor;

  __device__ explicit Quotients(const Online& row)
      : exponentials(base_of(row.max)), scale(1.0f / row.sum), with_factor(scale * exponentials.factor) {}
  __device__ float of(float logit) const {
    return exponentials.fits() ? exponentials.of(logit) * with_factor : power(logit, exponentials.base) * scale;
  }
};

}  // namespace minfer
