// The emulator's own `minfer/cuda/wgmma_registers_wide.cuh`: its `wgmma_registers` takes any width.
#pragma once

#include "cuda/wgmma_registers.cuh"

namespace minfer {

template <typename T, bool kTransposedB, int kRegisters>
void wgmma_registers_wide(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b, bool add) {
  wgmma_registers<T, kTransposedB>(d, a, b, add);
}

}  // namespace minfer
