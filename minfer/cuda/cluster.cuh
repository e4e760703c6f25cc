// Blocks of a cluster that give each other values through shared memory, which Hopper has (sm_90 and up). From the PTX ISA:
// "barrier.cluster", "mapa" and "st" to .shared::cluster.
#pragma once

#include "cuda/hopper.cuh"

namespace minfer {

// Together a barrier of all threads of the cluster, with what a thread does between them hidden behind it. It tells that
// all blocks have started, before which nobody may reach into their shared memory, and nothing of what was written.
__device__ inline void cluster_started_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void cluster_started_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// A barrier of all threads of the cluster; what any of them wrote to shared memory before, all may read behind it.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The same place of shared memory in another block of the cluster, to be read and written as any memory.
template <typename T>
__device__ T* at_block(T* here, int rank) {
  T* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
  return there;
}

// Writes to the same place in shared memory of another block of the cluster, or of this one.
__device__ inline void store_at_block(float2* place, float2 value, int block) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v2.f32 [remote], {%2, %3};\n}" ::"r"(shared_address(place)),
      "r"(block), "f"(value.x), "f"(value.y)
      : "memory");
}

}  // namespace minfer
