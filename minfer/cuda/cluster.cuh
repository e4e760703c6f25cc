// Blocks of a cluster that give each other values through shared memory, which Hopper has (sm_90 and up). From the PTX ISA:
// "barrier.cluster", "mapa" and "st" to .shared::cluster.
#pragma once

#include "cuda/hopper.cuh"

namespace minfer {

// Arrive and wait: together a barrier of all threads of the cluster; work between the two hides its latency. After it all
// blocks have started, so that their shared memory may be accessed. It orders no writes.
__device__ inline void cluster_started_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void cluster_started_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// A barrier of all threads of the cluster. What any of them wrote to shared memory before it, all may read after it.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The address of the same place in another block's shared memory, which can be read and written like any memory.
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
