// cpu_branchy: the function as one would write it, with an if, on a CPU.
// Idea: a CPU has no warps, but it guesses which way a branch goes, and a wrong guess costs about 15 to 20 cycles.
// Expected: light, the compiler makes vectors of a select. Heavy: a chain of 256 multiply-adds, at least 4 cycles each, an
// element: 1000 cycles, beside which a wrong guess is 2 %. The data hardly matters.
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

MINFER_DIVERGENCE(divergence_cpu_branchy, minfer::branchy)
