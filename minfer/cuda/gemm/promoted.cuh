// Sums of the tensor cores that are added up in fp32 registers after each stage, because fp8 tensor cores keep about 13 bits
// of a sum (docs/quant_gemm.md).
#pragma once

#include "cuda/gemm/warpgroup_tile.cuh"

namespace minfer {

// Adds the products of a stage, 64 rows of `a` by 2 kRegisters columns of `b`, to sums. The tensor cores multiply the columns
// in kParts parts, whose results use the same registers in turn.
template <int kParts, typename T, int kRegisters>
__device__ void add_products(float (&sums)[kRegisters], const T* a, const T* b) {
  constexpr int kPart = kRegisters / kParts;
  float part[1][kPart];
  const uint64_t rows = tile_descriptor(a, 16, 1024), cols = tile_descriptor(b, 16, 1024);
#pragma unroll
  for (int half = 0; half < kParts; ++half) {
    const uint64_t these = cols + half * (kPart * 2 * kBlockK * sizeof(T) / 16);  //@ half
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockK / 16; ++i)  // in units of 16 bytes: a step is 32 bytes of a row
      wgmma<T, false>(part[0], rows + i * 2, these + i * 2, i > 0);  //@ first_step
    wgmma_commit();
    wgmma_finish(part);
#pragma unroll
    for (int e = 0; e < kPart; ++e) sums[half * kPart + e] += part[0][e];
  }
}

}  // namespace minfer
