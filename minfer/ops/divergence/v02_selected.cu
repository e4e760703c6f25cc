// v02_selected: both sides computed by every thread, and one of the results selected.
// Idea: no branch, so no divergence: all 32 threads are active in every instruction.
// Expected: light, the same as v01_branchy, which the compiler has turned into this. Heavy: 512 multiply-adds for every
// element, whatever the data: 0.26 ms, what v01 takes for random signs. It has removed the divergence and kept its price;
// for sorted data it doubles the time. Two chains that do not wait for each other hide their latency better, which
// counts only where there are too few warps.
// Measured (H200, float32, positive, heavy, n=16777216): 405.6 GB/s cold; 86.6 % of torch.
#include "divergence.h"

namespace minfer {

template <typename Steps>
MINFER_ELEMENT float selected(float x, Steps steps) {
  float positive = 2.0f * x, other = x + 1.0f;
#pragma unroll 16
  for (int i = 0; i < int(steps); ++i) {  // in one loop, which the compiler does not put behind a branch
    positive = (1.0f - kRate) * positive + kRate;
    other = (1.0f + kRate) * other - kRate;
  }
  return x > 0.0f ? positive : other;
}

}  // namespace minfer

MINFER_DIVERGENCE(divergence_v02_selected, minfer::selected)
