// Shared memory of the other blocks of a cluster, which Hopper has (sm_90 and up).
// From the PTX ISA: "mapa", "barrier.cluster".
#pragma once

#include "cuda/hopper.cuh"

namespace minfer {

// The same place of shared memory in another block of the cluster, to be read and written as any memory.
template <typename T>
__device__ T* at_block(T* here, int rank) {
  T* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
  return there;
}

// A barrier of all threads of the cluster: each sees what any wrote before it.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

}  // namespace minfer
