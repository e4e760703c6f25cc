// The emulator's own `minfer/cuda/clocks.cuh`: each look at a clock is one cycle and one nanosecond later.
#pragma once

namespace minfer {

inline int64_t ticks = 1'000'000;

inline int64_t cycles() { return ++ticks; }
inline int64_t nanoseconds() { return ++ticks; }
inline int multiprocessor() { return static_cast<int>(emulator::state.current->block->number); }

}  // namespace minfer
