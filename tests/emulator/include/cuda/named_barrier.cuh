// The emulator's own `minfer/cuda/named_barrier.cuh`.
#pragma once

namespace minfer {

inline void meet_at(int number, int threads, bool waits) {
  if (number < 0 || number > 15) emulator::fail("names a barrier that a block does not have");
  if (threads <= 0 || threads % 32) emulator::fail("a named barrier is not of whole warps");
  int mine = number;
  emulator::collective("a named barrier", mine, [=](int** lanes) {  // all lanes of a warp come together
    for (unsigned i = 0; i < emulator::kWarp; ++i)
      if (*lanes[i] != number) emulator::fail("lanes of a warp name different barriers");
  });
  emulator::Thread* self = emulator::state.current;
  emulator::NamedBarrier& barrier = self->block->named[number];
  if (waits) barrier.waiting.push_back(self);
  if (++barrier.arrived < unsigned(threads)) {
    if (waits) emulator::wait_for("a named barrier");
    return;
  }
  const std::vector<emulator::Thread*> all = std::move(barrier.waiting);
  barrier = {};
  if (!all.empty()) emulator::release(all);
  if (waits) emulator::suspend();
}

inline void named_barrier_sync(int number, int threads) { meet_at(number, threads, true); }
inline void named_barrier_arrive(int number, int threads) { meet_at(number, threads, false); }

}  // namespace minfer
