// 2^x by the special function unit. From the PTX ISA: "ex2".
#pragma once

namespace minfer {

// The relative error is at most 2^-22.5 (the PTX ISA's figure); results below 2^-126 become zero. `exp2f` keeps them, and takes
// three instructions more.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace minfer
