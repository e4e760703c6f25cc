// The sum of each token's slots, which all kernels that multiply expert by expert end with.
//
// The second product writes the result of each slot, rounded to T, to rows of its own, and a launch adds those of a token in
// the order of their ranks, so that all runs give the same bits. Atomic additions to an fp32 copy of out would move as many
// bytes of L2, take a launch to fill it with zeros and one to round it, and give other bits in each run. The router's weights
// are applied here, in fp32, because the threads of the products have no registers left for them.
#pragma once

#include "cuda/dependent.cuh"
#include "cuda/vector.cuh"
#include "moe_ffn.h"

namespace minfer {

// A thread for 8 columns of a token.
template <typename T>
__global__ void __launch_bounds__(256) combine(Experts<T> p, const T* parts) {
  const int pieces = p.hidden / 8;
  const int64_t all = int64_t(p.tokens) * pieces;
  wait_for_previous();
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < all; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t token = i / pieces, col = i % pieces * 8;
    float sum[8] = {};
#pragma unroll 4
    for (int rank = 0; rank < p.k; ++rank) {
      const int64_t slot = token * p.k + rank;
      if (unsigned(p.indices[slot]) >= unsigned(p.experts)) continue;  // its expert is elsewhere: no part was written
      const float weight = p.weights[slot];
      float part[8];
      Vector<T>(*reinterpret_cast<const uint4*>(parts + slot * p.hidden + col)).unpack(part);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] += weight * part[e];
    }
    *reinterpret_cast<uint4*>(p.out + token * p.ldo + col) = Vector<T>(sum).bits;
  }
}

template <typename T>
dim3 combine_blocks(const Experts<T>& p) {
  const int64_t pieces = int64_t(p.tokens) * (p.hidden / 8), blocks = (pieces + 255) / 256;
  return dim3(static_cast<unsigned>(blocks < 1 << 20 ? blocks : 1 << 20));
}

template <typename T>
void launch_combine(const Experts<T>& p, const T* parts) {
  combine<<<combine_blocks(p), 256, 0, p.stream>>>(p, parts);
}

// The same, begun before the previous launch has ended.
template <typename T>
void launch_combine_early(const Experts<T>& p, const T* parts) {
  STD_CUDA_CHECK(launch_early(combine<T>, 1, combine_blocks(p), 256, 0, p.stream, p, parts));
}

}  // namespace minfer
