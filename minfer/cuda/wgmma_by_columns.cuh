// wgmma with any multiple of 16 columns of B. A is in shared memory, where it may be stored by columns.
// From the PTX ISA: "imm-trans-a" of wgmma.mma_async.
#pragma once

#include <utility>

#include "cuda/hopper.cuh"

namespace minfer {

#define MINFER_REGISTERS_88                                                                                       \
  MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) MINFER_10(5) MINFER_10(6) MINFER_10(7) "%80,%81,%82,%83,%84,%85,%86,%87"
#define MINFER_REGISTERS_104                                                                                      \
  MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) MINFER_10(5) MINFER_10(6) MINFER_10(7) MINFER_10(8) MINFER_10(9)         \
  "%100,%101,%102,%103"
#define MINFER_REGISTERS_120                                                                                      \
  MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) MINFER_10(5) MINFER_10(6) MINFER_10(7) MINFER_10(8) MINFER_10(9)         \
  MINFER_10(10) "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119"
#define MINFER_WGMMA_ORDER_A(TB) ", 1, " TB
#define MINFER_WGMMA_MORE_N(TYPES, ORDER)                                                                          \
  if constexpr (kRegisters == 88)                                                                                \
    MINFER_WGMMA(176, TYPES, ORDER, MINFER_REGISTERS_88, "%88", "%89", "%90", "%91", MINFER_D64(0), MINFER_D16(64),     \
                 MINFER_D8(80));                                                                                 \
  else if constexpr (kRegisters == 104)                                                                          \
    MINFER_WGMMA(208, TYPES, ORDER, MINFER_REGISTERS_104, "%104", "%105", "%106", "%107", MINFER_D64(0),                \
                 MINFER_D32(64), MINFER_D8(96));                                                                 \
  else if constexpr (kRegisters == 120)                                                                          \
    MINFER_WGMMA(240, TYPES, ORDER, MINFER_REGISTERS_120, "%120", "%121", "%122", "%123", MINFER_D64(0),                \
                 MINFER_D32(64), MINFER_D16(96), MINFER_D8(112));                                                \
  else                                                                                                           \
    MINFER_WGMMA_N(TYPES, ORDER)

// As `wgmma`, for every multiple of 16 columns of B. With kColumns A is stored by columns: each row of 128 bytes in shared
// memory has 64 rows of A at one k, as that of a transposed B has 64 columns. B is never transposed: a row of shared memory has
// one column of it.
template <typename T, bool kColumns, int kRegisters>
__device__ inline void wgmma_by_columns(float (&d)[kRegisters], uint64_t a, uint64_t b, bool add) {
  constexpr bool kTransposedB = false;
  if constexpr (std::is_same_v<T, __half>) {
    if constexpr (kColumns) {
      MINFER_WGMMA_MORE_N("k16.f32.f16.f16", MINFER_WGMMA_ORDER_A);
    } else {
      MINFER_WGMMA_MORE_N("k16.f32.f16.f16", MINFER_WGMMA_ORDER);
    }
  } else {
    if constexpr (kColumns) {
      MINFER_WGMMA_MORE_N("k16.f32.bf16.bf16", MINFER_WGMMA_ORDER_A);
    } else {
      MINFER_WGMMA_MORE_N("k16.f32.bf16.bf16", MINFER_WGMMA_ORDER);
    }
  }
}

}  // namespace minfer
