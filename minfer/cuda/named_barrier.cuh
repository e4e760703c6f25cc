// The numbered barriers of a block: some of its warps wait at one, and others may arrive without waiting.
// From the PTX ISA: "barrier{.cta}.sync" and "barrier{.cta}.arrive".
#pragma once

namespace minfer {

// A block has 16 barriers; number 0 is __syncthreads(). `threads`, a multiple of 32, is how many threads arrive at one,
// including those that do not wait; after that many it starts anew. The threads that wait see what the others wrote to shared
// memory before they arrived.

__device__ inline void named_barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Arrives and does not wait.
__device__ inline void named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace minfer
