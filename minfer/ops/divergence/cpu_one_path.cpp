// cpu_one_path: the constants are selected, not the results.
// Idea: one path for all elements, so that the compiler can give neighbouring elements the lanes of a vector.
// Expected: light, the same as cpu_branchy. Heavy: the compiler vectorises inner loops, and here the inner one is a chain, so
// little is gained unless it exchanges the loops.
#include "divergence.h"

namespace minfer {

template <typename Steps>
MINFER_ELEMENT float one_path(float x, Steps steps) {
  const bool positive = x > 0.0f;
  return steps_of(positive ? 2.0f * x : x + 1.0f, positive ? 1.0f - kRate : 1.0f + kRate, positive ? kRate : -kRate,
                  steps);
}

}  // namespace minfer

MINFER_DIVERGENCE(divergence_cpu_one_path, minfer::one_path)
