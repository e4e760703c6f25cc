// The position of a loop over a ring of stages in shared memory.
#pragma once

#include <cstdint>

namespace minfer {

// The next stage of a ring of kStages, and the parity of the phase of its barriers.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) parity ^= 1, stage = 0;
  }
  __device__ void skip(int steps) {
    stage += steps;
    parity ^= stage / kStages & 1, stage %= kStages;
  }
};

}  // namespace minfer
