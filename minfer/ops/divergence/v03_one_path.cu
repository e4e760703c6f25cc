// v03_one_path: the constants are selected, not the results: one path that serves both sides.
// Idea: the sides differ in numbers only, not in what is done with them. Three selects before the loop, and every thread
// makes its own side's multiply-adds at the same time as its neighbours make the others.
// Expected: light, the same as the others. Heavy: 256 multiply-adds an element for any data: 0.13 ms, half of v01's time for
// random signs and no more than it for sorted ones.
// Measured (H200, float32, positive, heavy, n=16777216): 471.0 GB/s cold; 100.5 % of torch.
#include "divergence.h"

namespace minfer {

template <typename Steps>
MINFER_ELEMENT float one_path(float x, Steps steps) {
  const bool positive = x > 0.0f;
  return steps_of(positive ? 2.0f * x : x + 1.0f, positive ? 1.0f - kRate : 1.0f + kRate, positive ? kRate : -kRate,
                  steps);
}

}  // namespace minfer

MINFER_DIVERGENCE(divergence_v03_one_path, minfer::one_path)
