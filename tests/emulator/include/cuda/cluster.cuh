// The emulator's own `minfer/cuda/cluster.cuh`.
#pragma once

#include "cuda/hopper.cuh"

namespace minfer {

inline void cluster_started_arrive() {}
inline void cluster_started_wait() { emulator::cluster_barrier(); }
inline void cluster_sync() { emulator::cluster_barrier(); }

template <typename T>
T* at_block(T* here, int rank) {
  return reinterpret_cast<T*>(emulator::at_block(here, rank));
}

inline void store_at_block(float2* place, float2 value, int block) {
  *reinterpret_cast<float2*>(emulator::at_block(place, block)) = value;
}

}  // namespace minfer
