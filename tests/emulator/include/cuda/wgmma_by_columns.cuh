// The emulator's own `minfer/cuda/wgmma_by_columns.cuh`.
#pragma once

#include "cuda/hopper.cuh"

namespace minfer {

template <typename T, bool kColumns, int kRegisters>
void wgmma_by_columns(float (&d)[kRegisters], uint64_t a, uint64_t b, bool add) {
  wgmma<T, false, kRegisters, kColumns>(d, a, b, add);
}

}  // namespace minfer
