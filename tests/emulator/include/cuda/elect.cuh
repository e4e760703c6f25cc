// As minfer/cuda/elect.cuh.
#pragma once

#include "runtime.h"

namespace minfer {

inline bool elected(int warp) { return threadIdx.x == 32u * warp; }

}  // namespace minfer
