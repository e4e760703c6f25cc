// The parts of a softmax over scores in the registers of tensor cores' accumulators. Its exponentials are 2^x, which the
// special function unit computes.
//
// In an accumulator of mma.m16n8k16, and of wgmma's m64nNk16 in each warp, the four lanes of a quad share a row.
// Of columns 8 j to 8 j + 7, a lane has two: 8 j + 2 (lane % 4) and the next. Its elements 4 j and 4 j + 1 are in row lane / 4,
// its elements 4 j + 2 and 4 j + 3 in the row 8 below. So a lane has elements of two rows, which are index 0 and 1 below.
// From the PTX ISA: "Matrix Fragments for mma.m16n8k16", "Register Fragments for wgmma.mma_async.m64nNk16".
#pragma once

#include "cuda/exp2.cuh"
#include "cuda/vector.cuh"

namespace minfer {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// What is subtracted from scores: their maximum, or zero where all scores are -inf, because -inf - -inf is NaN.
__device__ inline float base_of_row(float max) { return max == -INFINITY ? 0.0f : max; }

// tanh(x) = 1 - 2 / (1 + e^2x), with an absolute error of a few fp32 roundings of 1. tanh.approx has an error of 2^-11, which
// would be 0.02 in a score that is capped at 50.
__device__ inline float tanh_by_exp2(float x) { return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(x * (2.0f * kLog2E))); }

// The maximum, and the sum, over the four lanes of a quad.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// The running sums of the exponentials of a lane's two rows (Milakov and Gimelshein, Online normalizer calculation for
// softmax, 2018; Dao, FlashAttention-2, 2023). `base` is subtracted from each score; it is -inf before any score. The lanes
// of a quad share the base, and each sums its own columns, so that a block of scores takes two shuffles a row, not four.
//
// The base follows the maximum only when an exponential would exceed 2^kSlack, as in FlashAttention-4. So the sums are rarely
// rescaled. Exponentials of up to 256 have the same relative error as those of up to 1, also when rounded to fp16.
struct OnlineRows {
  static constexpr float kSlack = 8.0f;
  float base[2] = {-INFINITY, -INFINITY}, sum[2] = {};

  // Adds a block of scores, and replaces each by its exponential 2^(factor (score - base)), which is exp(score - base) with a
  // factor of log2(e). Scores may be -inf. Returns whether the caller must multiply its own sums by `rescale`, as `add` does
  // with `sum`; all lanes of a warp return the same.
  template <int kCount>
  __device__ bool add(float (&scores)[kCount], float factor, float (&rescale)[2]) {
    float highest[2] = {-INFINITY, -INFINITY}, exponent[2];
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest[i / 2 % 2] = fmaxf(highest[i / 2 % 2], scores[i]);
    bool grows = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      highest[r] = quad_max(highest[r]);
      const bool beyond = (highest[r] - base[r]) * factor > kSlack;  // false for -inf of both, whose difference is NaN
      const float next = beyond ? highest[r] : base[r];
      exponent[r] = base_of_row(next) * factor;
      rescale[r] = beyond ? exp2_approx(base[r] * factor - exponent[r]) : 1.0f;
      base[r] = next, sum[r] *= rescale[r], grows |= beyond;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scores[i] = exp2_approx(fmaf(scores[i], factor, -exponent[i / 2 % 2]));
      sum[i / 2 % 2] += scores[i];
    }
    return __ballot_sync(0xffffffff, grows) != 0;
  }

  // The same, with the exponentials rounded to T as fragments of a product's left operand; the scores stay as they are. The
  // base stays while a lane's exponentials of a row add up to at most kMost, so that usually no maximum is needed. Exponentials
  // of any size are as exact, while they and their sums do not overflow. The first block of a row always takes the maximum.
  template <typename T, bool kFirst, int kCount>
  __device__ bool add_rounded(const float (&scores)[kCount], uint32_t (&exponentials)[kCount / 8][4], float factor,
                              float (&rescale)[2]) {
    constexpr float kMost = std::is_same_v<T, __half> ? 0x1p13f : 0x1p40f;
    float part[2], exponent[2] = {base[0] * factor, base[1] * factor};
    bool grows = true;
    if constexpr (!kFirst) {
      add_exponentials<T>(scores, exponentials, factor, exponent, part);
      // The parts are NaN, or infinite, while a row has no base.
      grows = __ballot_sync(0xffffffff, !(part[0] <= kMost && part[1] <= kMost)) != 0;  //@ too_large
    }
    rescale[0] = rescale[1] = 1.0f;
    if (grows) {
      float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < kCount; ++i) highest[i / 2 % 2] = fmaxf(highest[i / 2 % 2], scores[i]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float next = fmaxf(base[r], quad_max(highest[r]));
        exponent[r] = base_of_row(next) * factor;
        rescale[r] = next > base[r] ? exp2_approx(base[r] * factor - exponent[r]) : 1.0f;
        base[r] = next;
      }
      add_exponentials<T>(scores, exponentials, factor, exponent, part);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], rescale[r], part[r]);
    return grows;
  }

  // The same, but `rescale` is the square root of the factor, and the caller multiplies by it twice. The factor itself is 0 in
  // fp32 below 2^-126. Then small terms of the caller's sums would vanish, which shows where the key with the largest score has
  // a value of exactly 0, as some have in fp8.
  template <typename T, bool kFirst, int kCount>
  __device__ bool add_in_halves(const float (&scores)[kCount], uint32_t (&exponentials)[kCount / 8][4], float factor,
                                float (&rescale)[2]) {
    const float before[2] = {base[0], base[1]};
    const bool grows = add_rounded<T, kFirst>(scores, exponentials, factor, rescale);
    if (grows)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (base[r] > before[r]) rescale[r] = exp2_approx((before[r] - base[r]) * (0.5f * factor));  //@ root
    return grows;
  }

  template <typename T, int kCount>
  __device__ static void add_exponentials(const float (&scores)[kCount], uint32_t (&exponentials)[kCount / 8][4], float factor,
                                    const float (&exponent)[2], float (&part)[2]) {
    part[0] = part[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const int r = i / 2 % 2;
      const float first = exp2_approx(fmaf(scores[i], factor, -exponent[r]));
      const float second = exp2_approx(fmaf(scores[i + 1], factor, -exponent[r]));
      part[r] += first, part[r] += second;
      round_to(reinterpret_cast<typename Vector<T>::Pair&>(exponentials[i / 8][i / 2 % 4]), first, second);
    }
  }

  // Moves the base to `next`, to which another warpgroup has moved it for the same rows. Returns the same as `add`.
  __device__ bool follow(const float (&next)[2], float factor, float (&rescale)[2]) {
    bool grows = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool moves = next[r] != base[r];
      rescale[r] = moves ? exp2_approx(base[r] * factor - next[r] * factor) : 1.0f;
      base[r] = next[r], sum[r] *= rescale[r], grows |= moves;
    }
    return __ballot_sync(0xffffffff, grows) != 0;
  }

  // Called once, after the last block. `inverse` is 1 over the whole sum, 0 for a row whose scores are all -inf. `lse` is the
  // natural logarithm of the sum of 2^(factor score), -inf for such a row.
  __device__ void finish(float factor, float (&inverse)[2], float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float whole = quad_sum(sum[r]);
      inverse[r] = base[r] == -INFINITY ? 0.0f : 1.0f / whole;
      lse[r] = base[r] == -INFINITY ? -INFINITY : (base[r] * factor + log2f(whole)) * kLn2;
    }
  }
};

// Multiplies a lane's accumulators by a factor for each of its two rows.
template <int kCount>
__device__ inline void scale_rows(float (&values)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] *= factor[i / 2 % 2];
}

// Rounds the accumulators of the 16 columns from 16 * step on to T, as the A fragment of a product over these 16 columns.
template <typename T, int kCount>
__device__ inline void to_fragment(uint32_t (&a)[4], const float (&values)[kCount], int step) {
  using Pair = typename Vector<T>::Pair;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    round_to(reinterpret_cast<Pair&>(a[i]), values[8 * step + 2 * i], values[8 * step + 2 * i + 1]);
}

}  // namespace minfer
