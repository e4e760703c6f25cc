// Sums of the tensor cores that are added up in fp32 registers after each stage, because fp8 tensor cores keep about 13 bits
// of a sum (docs/quant_gemm.md).
#pragma once

#include "cuda/gemm/warpgroup_tile.cuh"
#include "cuda/wgmma_registers.cuh"

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

// Adds the products of all steps of a fitted tile to `sums`, one slab of 64 columns after the other, of which a warpgroup has
// kWide. start(buffer, stage, slab) starts the products of a slab in a stage, and release(stage) gives the stage back. With two
// buffers the tensor cores fill one while threads add the other.
template <int kBuffers, int kWide, int kRegisters, int kStages, typename Start, typename Release>
__device__ void add_up_steps(float (&sums)[kWide][kRegisters], Ring<kStages>& ring, uint64_t* full, int begin, int end,
                             Start start, Release release) {
  float buffers[kBuffers][kRegisters];
#pragma unroll
  for (int i = 0; i < kWide * kRegisters; ++i) sums[i / kRegisters][i % kRegisters] = 0.0f;
  const auto wait_stage = [&] { barrier_wait(full + ring.stage, ring.parity); };
  const auto add = [&](int w, int buffer) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) sums[w][i] += buffers[buffer][i];
  };
  // One step. With two buffers, its first slab is being multiplied already, into buffer kFirst. kLast: start nothing of a next
  // step; with one buffer this is always so.
  const auto step_of = [&]<int kFirst, bool kLast>() {
#pragma unroll
    for (int w = 0; w < kWide; ++w) {
      const int buffer = (kFirst + w) % kBuffers, stage = ring.stage;
      const bool stage_ends = w + 1 == kWide, is_last = stage_ends && kLast;
      if (kBuffers == 1) start(buffers[0], stage, w);
      else if (!stage_ends) start(buffers[1 - buffer], stage, w + 1);
      if (stage_ends) ring.advance();
      if (kBuffers == 2 && stage_ends && !kLast) wait_stage(), start(buffers[1 - buffer], ring.stage, 0);
      kBuffers == 1 || is_last ? wgmma_wait_for<0>(buffers[buffer]) : wgmma_wait_for<1>(buffers[buffer]);  //@ part_done
      if (stage_ends) release(stage);
      add(w, buffer);
    }
  };
  if constexpr (kBuffers == 1) {
#pragma unroll 1
    for (int step = begin; step < end; ++step) wait_stage(), step_of.template operator()<0, true>();
  } else {
    wait_stage();
    start(buffers[0], ring.stage, 0);
    constexpr int kOther = kWide % 2;  // 1: every other step begins with buffer 1
    constexpr int kAtOnce = 1 + kOther;
    int left = end - begin;
#pragma unroll 1
    for (; left > kAtOnce; left -= kAtOnce) {
      step_of.template operator()<0, false>();
      if constexpr (kOther == 1) step_of.template operator()<1, false>();
    }
    if (kOther == 1 && left == 2) {
      step_of.template operator()<0, false>();
      step_of.template operator()<kOther, true>();
    } else {
      step_of.template operator()<0, true>();
    }
  }
}

}  // namespace minfer
