// The emulator's own `minfer/cuda/cp_async_arrive.cuh`, which it stands in for.
#pragma once

#include "cuda/hopper.cuh"

namespace minfer {

// All copies that the thread has in flight end some time later, then it arrives.
inline void cp_async_arrive(uint64_t* at) {
  emulator::Thread* self = emulator::state.current;
  emulator::Barrier* barrier = &emulator::barrier_at(at);
  std::vector<emulator::Copy> copies = std::move(self->open);
  self->open.clear();
  for (auto& group : self->groups) copies.insert(copies.end(), group.begin(), group.end());
  self->groups.clear();
  barrier->of_cp_async = true;
  emulator::start([=] {
    for (const auto& [to, from, bytes] : copies) from ? memcpy(to, from, bytes) : memset(to, 0, bytes);
    emulator::arrive(*barrier, 0);
  });
}

}  // namespace minfer
