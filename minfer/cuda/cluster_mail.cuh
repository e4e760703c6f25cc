// Values that blocks of a cluster send each other, with a barrier in the receiver's shared memory that counts their bytes. From
// the PTX ISA: "st.async" and "mapa".
#pragma once

#include "cuda/cluster.cuh"

namespace minfer {

// Writes to the same place in shared memory of another block of the cluster, or of this one. Its 8 bytes arrive at the same
// barrier of that block. Unlike the release of a cluster's barrier, it does not wait for what the thread has stored in global
// memory.
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
