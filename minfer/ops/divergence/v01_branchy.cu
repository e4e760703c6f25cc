// v01_branchy: the function as one would write it, with an if.
// Idea: a warp executes one instruction for its 32 threads. Where they disagree at a branch, it goes down one side with a
// part of its threads switched off, and then down the other.
// Expected: light, nothing at all: for so short a branch the compiler writes a select, and the kernel is bound by memory.
// Heavy: of 2^24 elements 256 multiply-adds each are 0.13 ms at an H200's 33.5 x 10^12 a second, and memory takes 0.03 ms.
// Random signs: every warp goes down both sides, 0.26 ms, with 16 active threads an instruction. Sorted: all warps but one go
// down one side, 0.13 ms, the same as all positive.
// Measured (H200, float32, positive, heavy, n=16777216): 739.7 GB/s cold; 157.9 % of torch.
#include "divergence.h"

namespace minfer {

template <typename Steps>
MINFER_ELEMENT float branchy(float x, Steps steps) {
  float y;
  if (x > 0.0f) y = steps_of(2.0f * x, 1.0f - kRate, kRate, steps);
  else y = steps_of(x + 1.0f, 1.0f + kRate, -kRate, steps);
  return y;
}

}  // namespace minfer

MINFER_DIVERGENCE(divergence_v01_branchy, minfer::branchy)
