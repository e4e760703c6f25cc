// Products of a warpgroup whose A is in registers, as attention needs them: its threads have just computed the probabilities
// that are A. From the PTX ISA: "Register Fragments for wgmma.mma_async.m64nNk16".
#pragma once

#include "cuda/hopper.cuh"

namespace minfer {

#define MINFER_WGMMA_A(N, TYPES, REGISTERS, A, B, ADD, TB, ...)                                                     \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                                 \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16." TYPES " {" REGISTERS "}, {" A "}, " B ", add, 1, 1, " TB \
               ";\n}"                                                                                                \
               : __VA_ARGS__                                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(int(kTransposedB)))
#define MINFER_WGMMA_A_N(TYPES)                                                                                       \
  if constexpr (kRegisters == 128)                                                                                  \
    MINFER_WGMMA_A(256, TYPES, MINFER_REGISTERS_128, "%128,%129,%130,%131", "%132", "%133", "%134", MINFER_D64(0),   \
                   MINFER_D64(64));                                                                                 \
  else if constexpr (kRegisters == 64)                                                                              \
    MINFER_WGMMA_A(128, TYPES, MINFER_REGISTERS_64, "%64,%65,%66,%67", "%68", "%69", "%70", MINFER_D64(0));          \
  else if constexpr (kRegisters == 32)                                                                              \
    MINFER_WGMMA_A(64, TYPES, MINFER_REGISTERS_32, "%32,%33,%34,%35", "%36", "%37", "%38", MINFER_D32(0));           \
  else                                                                                                              \
    static_assert(kRegisters == 0, "add its registers above")

// d = a b, or d += a b: 64 x 2 kRegisters of the product, 16 steps in k. `a` is a warp's fragment of 16 rows, as mma.m16n8k16
// has it, and must not change before the product has been waited for; b is a descriptor, and d is as wgmma's.
template <typename T, bool kTransposedB, int kRegisters>
__device__ inline void wgmma_registers(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __half>) {
    MINFER_WGMMA_A_N("f32.f16.f16");
  } else {
    MINFER_WGMMA_A_N("f32.bf16.bf16");
  }
}

// Waits until at most kPending groups are in flight, after which the thread may read d; the compiler moves no such read before.
template <int kPending, int kRegisters>
__device__ inline void wgmma_wait_for(float (&d)[kRegisters]) {
  wgmma_wait<kPending>();
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

}  // namespace minfer
