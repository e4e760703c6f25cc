// The emulator's own `minfer/cuda/cluster_mail.cuh`: a value arrives at any time after it was sent.
#pragma once

#include "cuda/cluster.cuh"

namespace minfer {

inline void mail_to_block(float2* place, float2 value, uint64_t* barrier, int block) {
  float2* to = reinterpret_cast<float2*>(emulator::at_block(place, block));
  emulator::Barrier* arrived = &emulator::barrier_at(emulator::at_block(barrier, block));
  emulator::start([=, other = emulator::state.current->block + block - emulator::state.current->block->rank] {
    if (emulator::has_ended(*other)) emulator::fail("sends to a block that has ended");
    *to = value;
    arrived->bytes -= sizeof(value);
    emulator::end_phase_if_complete(*arrived);
  });
}

}  // namespace minfer
