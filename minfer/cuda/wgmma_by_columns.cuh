// wgmma with any multiple of 8 columns of B from 64 to 256. A is in shared memory, where it may be stored by columns.
// From the PTX ISA: "imm-trans-a" of wgmma.mma_async.
#pragma once

#include <utility>

#include "cuda/hopper.cuh"

namespace minfer {

#define MINFER_REGISTERS_36 MINFER_REGISTERS_30 "%30,%31,%32,%33,%34,%35"
#define MINFER_REGISTERS_44 MINFER_REGISTERS_30 MINFER_10(3) "%40,%41,%42,%43"
#define MINFER_REGISTERS_52 MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) "%50,%51"
#define MINFER_REGISTERS_60 MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59"
#define MINFER_REGISTERS_68 MINFER_REGISTERS_30 MINFER_10(3) MINFER_10(4) MINFER_10(5) "%60,%61,%62,%63,%64,%65,%66,%67"
#define MINFER_REGISTERS_76 MINFER_REGISTERS_70 "%70,%71,%72,%73,%74,%75"
#define MINFER_REGISTERS_84 MINFER_REGISTERS_70 MINFER_10(7) "%80,%81,%82,%83"
#define MINFER_REGISTERS_88 MINFER_REGISTERS_70 MINFER_10(7) "%80,%81,%82,%83,%84,%85,%86,%87"
#define MINFER_REGISTERS_92 MINFER_REGISTERS_70 MINFER_10(7) MINFER_10(8) "%90,%91"
#define MINFER_REGISTERS_100 MINFER_REGISTERS_70 MINFER_10(7) MINFER_10(8) "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99"
#define MINFER_REGISTERS_104 MINFER_REGISTERS_70 MINFER_10(7) MINFER_10(8) MINFER_10(9) "%100,%101,%102,%103"
#define MINFER_REGISTERS_108 \
  MINFER_REGISTERS_70 MINFER_10(7) MINFER_10(8) MINFER_10(9) "%100,%101,%102,%103,%104,%105,%106,%107"
#define MINFER_REGISTERS_116 \
  MINFER_REGISTERS_70 MINFER_10(7) MINFER_10(8) MINFER_10(9) MINFER_10(10) "%110,%111,%112,%113,%114,%115"
#define MINFER_REGISTERS_120 \
  MINFER_REGISTERS_70 MINFER_10(7) MINFER_10(8) MINFER_10(9) MINFER_10(10) "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119"
#define MINFER_REGISTERS_124 \
  MINFER_REGISTERS_70 MINFER_10(7) MINFER_10(8) MINFER_10(9) MINFER_10(10) MINFER_10(11) "%120,%121,%122,%123"
#define MINFER_WGMMA_ORDER_A(TB) ", 1, " TB
#define MINFER_WGMMA_MORE_N(TYPES, ORDER) \
  if constexpr (kRegisters == 36) \
    MINFER_WGMMA(72, TYPES, ORDER, MINFER_REGISTERS_36, "%36", "%37", "%38", "%39", \
                 MINFER_D32(0), MINFER_D4(32)); \
  else if constexpr (kRegisters == 44) \
    MINFER_WGMMA(88, TYPES, ORDER, MINFER_REGISTERS_44, "%44", "%45", "%46", "%47", \
                 MINFER_D32(0), MINFER_D8(32), MINFER_D4(40)); \
  else if constexpr (kRegisters == 52) \
    MINFER_WGMMA(104, TYPES, ORDER, MINFER_REGISTERS_52, "%52", "%53", "%54", "%55", \
                 MINFER_D32(0), MINFER_D16(32), MINFER_D4(48)); \
  else if constexpr (kRegisters == 60) \
    MINFER_WGMMA(120, TYPES, ORDER, MINFER_REGISTERS_60, "%60", "%61", "%62", "%63", \
                 MINFER_D32(0), MINFER_D16(32), MINFER_D8(48), MINFER_D4(56)); \
  else if constexpr (kRegisters == 68) \
    MINFER_WGMMA(136, TYPES, ORDER, MINFER_REGISTERS_68, "%68", "%69", "%70", "%71", \
                 MINFER_D64(0), MINFER_D4(64)); \
  else if constexpr (kRegisters == 76) \
    MINFER_WGMMA(152, TYPES, ORDER, MINFER_REGISTERS_76, "%76", "%77", "%78", "%79", \
                 MINFER_D64(0), MINFER_D8(64), MINFER_D4(72)); \
  else if constexpr (kRegisters == 84) \
    MINFER_WGMMA(168, TYPES, ORDER, MINFER_REGISTERS_84, "%84", "%85", "%86", "%87", \
                 MINFER_D64(0), MINFER_D16(64), MINFER_D4(80)); \
  else if constexpr (kRegisters == 88) \
    MINFER_WGMMA(176, TYPES, ORDER, MINFER_REGISTERS_88, "%88", "%89", "%90", "%91", \
                 MINFER_D64(0), MINFER_D16(64), MINFER_D8(80)); \
  else if constexpr (kRegisters == 92) \
    MINFER_WGMMA(184, TYPES, ORDER, MINFER_REGISTERS_92, "%92", "%93", "%94", "%95", \
                 MINFER_D64(0), MINFER_D16(64), MINFER_D8(80), MINFER_D4(88)); \
  else if constexpr (kRegisters == 100) \
    MINFER_WGMMA(200, TYPES, ORDER, MINFER_REGISTERS_100, "%100", "%101", "%102", "%103", \
                 MINFER_D64(0), MINFER_D32(64), MINFER_D4(96)); \
  else if constexpr (kRegisters == 104) \
    MINFER_WGMMA(208, TYPES, ORDER, MINFER_REGISTERS_104, "%104", "%105", "%106", "%107", \
                 MINFER_D64(0), MINFER_D32(64), MINFER_D8(96)); \
  else if constexpr (kRegisters == 108) \
    MINFER_WGMMA(216, TYPES, ORDER, MINFER_REGISTERS_108, "%108", "%109", "%110", "%111", \
                 MINFER_D64(0), MINFER_D32(64), MINFER_D8(96), MINFER_D4(104)); \
  else if constexpr (kRegisters == 116) \
    MINFER_WGMMA(232, TYPES, ORDER, MINFER_REGISTERS_116, "%116", "%117", "%118", "%119", \
                 MINFER_D64(0), MINFER_D32(64), MINFER_D16(96), MINFER_D4(112)); \
  else if constexpr (kRegisters == 120) \
    MINFER_WGMMA(240, TYPES, ORDER, MINFER_REGISTERS_120, "%120", "%121", "%122", "%123", \
                 MINFER_D64(0), MINFER_D32(64), MINFER_D16(96), MINFER_D8(112)); \
  else if constexpr (kRegisters == 124) \
    MINFER_WGMMA(248, TYPES, ORDER, MINFER_REGISTERS_124, "%124", "%125", "%126", "%127", \
                 MINFER_D64(0), MINFER_D32(64), MINFER_D16(96), MINFER_D8(112), MINFER_D4(120)); \
  else \
    MINFER_WGMMA_N(TYPES, ORDER)

// As `wgmma`, for these numbers of columns of B. With kColumns A is stored by columns: each row of 128 bytes in shared
// memory has 64 rows of A at one k, as that of a transposed B has 64 columns. B is never transposed: a row of shared memory has
// one column of it.
template <typename T, bool kColumns, int kRegisters>
__device__ inline void wgmma_by_columns(float (&d)[kRegisters], uint64_t a, uint64_t b, bool add) {
  constexpr bool kTransposedB = false;
  if constexpr (std::is_same_v<T, E4M3Pair>) {
    static_assert(!kColumns);
    MINFER_WGMMA_MORE_N("k32.f32.e4m3.e4m3", MINFER_WGMMA_NO_ORDER);
  } else if constexpr (std::is_same_v<T, __half>) {
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
