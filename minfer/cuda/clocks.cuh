// The clocks of a multiprocessor and of the GPU.
// From the PTX ISA, "Special Registers": %clock64, %globaltimer and %smid.
#pragma once

#include <cstdint>

namespace minfer {

// Cycles of this multiprocessor. The instructions before it in the program are issued before it.
__device__ inline int64_t cycles() {
  int64_t now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
}

// Nanoseconds of a clock that all multiprocessors share, in steps that depend on the GPU.
__device__ inline int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// The number of this multiprocessor.
__device__ inline int multiprocessor() {
  int number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

}  // namespace minfer
