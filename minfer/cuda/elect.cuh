// One lane of a warp that starts copies.
#pragma once

#include <cstdint>

namespace minfer {

// Whether this thread is the elected lane of warp `warp` of its block. All lanes of that warp call it, and other warps may. In a
// branch on this, ptxas knows that one thread is active. In a branch on a thread's number it does not know that, and puts a loop
// over the active threads around each of TMA's copies: 12 more instructions, which take 50 cycles or more on an H200.
__device__ inline bool elected(int warp) {
  if (threadIdx.x / 32 != warp) return false;
  uint32_t is_elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is_elected));
  return is_elected;
}

}  // namespace minfer
