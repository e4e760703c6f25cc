// The PTX that feeds and runs tensor cores from sm_80 on, as functions with the names of the instructions. For the layouts of
// fragments over the lanes of a warp see the PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace minfer {

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Four 8x8 matrices of 16-bit elements: lane 8 i + r points to row r of matrix i, 16 bytes, aligned.
__device__ inline void ldmatrix_x4(uint32_t (&fragment)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, each matrix transposed.
__device__ inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address(row))
               : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements, of which lane l has elements 2 (l % 4) and the next of row l / 4.
__device__ inline uint32_t movmatrix_trans(uint32_t matrix) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
  return transposed;
}

// Two e4m3 numbers, neighbours in k, as one element of 16 bits: a tile of fp8 is then handled like a tile of a half type,
// except in products.
struct E4M3Pair {
  uint16_t bits;
};

// d += a b, a 16x16 of T, b 16x8 of T, d 16x8 in fp32. With E4M3Pair it is m16n8k32, from sm_89 on.
template <typename T>
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, E4M3Pair>)
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a b with d in fp16, two to a register; only for T = __half.
template <typename T>
__device__ inline void mma_m16n8k16(uint32_t (&d)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, __half>, "only fp16 accumulates in fp16");
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// (word & mask) | base as one instruction: for two constants, the compiler by itself takes two.
__device__ inline uint32_t mask_or(uint32_t word, uint32_t mask, uint32_t base) {
  uint32_t found;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(found) : "r"(word), "r"(mask), "r"(base));
  return found;
}

// Copies 16 bytes to shared memory while the thread goes on, past L1; writes zeros and reads nothing when not `inside`.
__device__ inline void cp_async_16(void* shared, const void* global, bool inside = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(inside ? 16 : 0)
               : "memory");
}

// The same of 4 or 8 bytes, through L1.
template <int kBytes>
__device__ inline void cp_async_few(void* shared, const void* global, bool inside = true) {
  static_assert(kBytes == 4 || kBytes == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global), "n"(kBytes),
               "r"(inside ? kBytes : 0)
               : "memory");
}

// Starts bringing the line of an address to L2. It may be any address, but not one of another space.
__device__ inline void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// Closes the group of this thread's copies since the last one.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's youngest groups are in flight.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace minfer
