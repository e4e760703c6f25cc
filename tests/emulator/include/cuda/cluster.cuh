// The emulator's own `minfer/cuda/cluster.cuh`.
#pragma once

#include "cuda/hopper.cuh"

namespace minfer {

template <typename T>
T* at_block(T* here, int rank) {
  return reinterpret_cast<T*>(emulator::at_block(here, rank));
}
inline void cluster_sync() { emulator::cluster_barrier(); }

}  // namespace minfer
