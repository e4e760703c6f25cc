// Blocks of a cluster send each other values. A barrier in the receiver's shared memory counts the bytes that have arrived.
// From the PTX ISA: "st.async" and "mapa".
#pragma once

#include "cuda/cluster.cuh"

namespace minfer {

// Writes `value` to `place` in the shared memory of another block of the cluster, or of this one. That block's `barrier` counts
// its 8 bytes. Unlike the release of a cluster's barrier, this does not wait until the thread's stores to global memory are
// done.
__device__ inline void mail_to_block(float2* place, float2 value, uint64_t* barrier, int block) {
  asm volatile(
      "{\n.reg .b32 remote, arrived;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 arrived, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [remote], {%3, %4}, [arrived];\n}" ::"r"(
          shared_address(place)),
      "r"(shared_address(barrier)), "r"(block), "f"(value.x), "f"(value.y)
      : "memory");
}

}  // namespace minfer
