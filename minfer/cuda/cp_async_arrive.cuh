// Copies of 16 bytes that signal an mbarrier by themselves. From the PTX ISA: "cp.async.mbarrier.arrive".
#pragma once

#include "cuda/hopper.cuh"

namespace minfer {

// Arrives at `barrier` when all cp.async that this thread has started before are done; the thread goes on at once. It is one of
// the arrivals that the barrier was initialised for. These copies are ordinary writes: a thread that has waited for the barrier
// sees them, and calls fence_async() before wgmma reads them.
__device__ inline void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

}  // namespace minfer
