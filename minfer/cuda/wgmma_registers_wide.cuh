// wgmma with A in registers, for widths that wgmma_registers.cuh does not have: 96, 160, 192 and 224.
// From the PTX ISA: "Register Fragments for wgmma.mma_async.m64nNk16".
#pragma once

#include "cuda/wgmma_registers.cuh"

namespace minfer {

#define MINFER_WGMMA_A_WIDE(TYPES)                                                                                    \
  if constexpr (kRegisters == 112)                                                                                    \
    MINFER_WGMMA_A(224, TYPES, MINFER_REGISTERS_112, "%112,%113,%114,%115", "%116", "%117", "%118", MINFER_D64(0),    \
                   MINFER_D32(64), MINFER_D16(96));                                                                   \
  else if constexpr (kRegisters == 96)                                                                                     \
    MINFER_WGMMA_A(192, TYPES, MINFER_REGISTERS_96, "%96,%97,%98,%99", "%100", "%101", "%102", MINFER_D64(0),         \
                   MINFER_D32(64));                                                                                   \
  else if constexpr (kRegisters == 80)                                                                                \
    MINFER_WGMMA_A(160, TYPES, MINFER_REGISTERS_80, "%80,%81,%82,%83", "%84", "%85", "%86", MINFER_D64(0),            \
                   MINFER_D16(64));                                                                                   \
  else                                                                                                                \
    MINFER_WGMMA_A(96, TYPES, MINFER_REGISTERS_48, "%48,%49,%50,%51", "%52", "%53", "%54", MINFER_D32(0), MINFER_D16(32))

// As wgmma_registers. d is 64 rows by 2 kRegisters columns of the product.
template <typename T, bool kTransposedB, int kRegisters>
__device__ inline void wgmma_registers_wide(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (kRegisters != 48 && kRegisters != 80 && kRegisters != 96 && kRegisters != 112) {
    wgmma_registers<T, kTransposedB>(d, a, b, add);
  } else if constexpr (std::is_same_v<T, __half>) {
    MINFER_WGMMA_A_WIDE("f32.f16.f16");
  } else {
    MINFER_WGMMA_A_WIDE("f32.bf16.bf16");
  }
}

}  // namespace minfer
