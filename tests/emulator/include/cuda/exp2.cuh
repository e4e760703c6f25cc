// The emulator's own `minfer/cuda/exp2.cuh`.
#pragma once

#include <cmath>

namespace minfer {

inline float exp2_approx(float x) { return std::exp2(x); }

}  // namespace minfer
