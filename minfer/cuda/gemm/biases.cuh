// A bias and an activation in the kernels for Hopper: a thread's biases, and what it does with them and its sums.
#pragma once

#include "cuda/gemm/warpgroup_tile.cuh"
#include "cuda/vector.cuh"
#include "ops/gemm_bias.h"

namespace minfer {

// Of two neighbouring columns in each 8 of kN, as they are in memory; 0 beyond the last column.
template <typename T, int kN>
struct Biases {
  uint32_t bits[kN / 8];

  __device__ Biases(const Biased<T>& g, int col0) {
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const int col = col0 + j * 8 + threadIdx.x % 4 * 2;
      bits[j] = col < g.n ? *reinterpret_cast<const uint32_t*>(g.bias + col) : 0;
    }
  }

  // kInOrder: one pair of columns after the other, which takes fewer registers.
  template <bool kInOrder = false, int kRegisters, typename Activation>
  __device__ void apply(float (&sums)[kRegisters], Activation activation) const {
    static_assert(kRegisters == kN / 2);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      uint32_t pair = bits[j];
      if constexpr (kInOrder) asm volatile("" : "+r"(pair));
      const float2 bias = to_floats(reinterpret_cast<const typename Vector<T>::Pair&>(pair));
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j * 4 + e] = activation(sums[j * 4 + e] + (e % 2 ? bias.y : bias.x));  //@ bias_of_column
    }
  }
};

// The problem of a kernel that is given its activation: `float operator()(float)`.
template <typename T, typename Activation>
struct Activated : Biased<T> {
  Activation activation;
};

}  // namespace minfer
