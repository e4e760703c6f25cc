// exp(logit - maximum) with one instruction less for each logit than `power` of online.cuh.
#pragma once

#include "online.cuh"

namespace minfer {

constexpr float kLog2E = 1.44269504f;
constexpr float kLarge = 1e30f;  // the product of log2 e and a much larger logit may overflow

// exp(logit - base) as one multiply-add and one power of two. The product of `base` and log2 e is rounded, which changes all
// exponentials by the same factor. Multiplying by `factor` corrects that.
struct Exponentials {
  float base, scaled, factor;

  __device__ explicit Exponentials(float base)
      : base(base), scaled(base * kLog2E), factor(exp2_approx(fmaf(-base, kLog2E, scaled))) {}
  __device__ bool fits() const { return fabsf(base) < kLarge; }  // otherwise use `power`
  __device__ float of(float logit) const { return exp2_approx(fmaf(logit, kLog2E, -scaled)); }
};

// Adds a group of logits, as Online::add does.
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

// The softmax of a row's logits, from the row's maximum and sum.
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
