// The barriers of a block by their numbers: some of its warps meet at one, and others may arrive and not wait.
// From the PTX ISA: "barrier{.cta}.sync" and "barrier{.cta}.arrive".
#pragma once

namespace minfer {

// A block has 16 barriers; number 0 is __syncthreads(). `threads`, a multiple of 32, is how many arrive at one, those that wait
// and those that do not; then it begins anew. What a thread wrote to shared memory before, those see that wait.

__device__ inline void named_barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Arrives and does not wait.
__device__ inline void named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace minfer
