// The emulator's own `minfer/cuda/mma.cuh`, which it stands in for: written from the PTX ISA, sections "Matrix multiply-
// accumulate operation using mma instruction", "ldmatrix" and "cp.async", and not from ours. g = lane / 4, t = lane % 4.
#pragma once

#include <type_traits>

#include "runtime.h"

namespace minfer {

// ldmatrix: lane 8 i + r points to row r of the 8x8 matrix i; lane l gets the elements 2 t and 2 t + 1 of row g of each.
// With .trans, those of the transposed matrix.
template <bool kTransposed>
void emulated_ldmatrix_x4(uint32_t (&fragment)[4], const void* row) {
  struct Operands {
    const uint16_t* row;
    uint32_t* fragment;
  } mine{static_cast<const uint16_t*>(row), fragment};
  emulator::check_shared("ldmatrix", row, 16);
  emulator::collective(kTransposed ? "ldmatrix.trans" : "ldmatrix", mine, [](Operands** lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        uint16_t two[2];
        for (int e = 0; e < 2; ++e) {
          const int major = lane / 4, minor = lane % 4 * 2 + e;
          two[e] = kTransposed ? lanes[8 * i + minor]->row[major] : lanes[8 * i + major]->row[minor];
        }
        memcpy(&lanes[lane]->fragment[i], two, 4);
      }
  });
}

inline void ldmatrix_x4(uint32_t (&fragment)[4], const void* row) { emulated_ldmatrix_x4<false>(fragment, row); }
inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], const void* row) { emulated_ldmatrix_x4<true>(fragment, row); }

// movmatrix.trans: lane l gives the elements 2 t and 2 t + 1 of row g, and gets those of the transposed matrix.
inline uint32_t movmatrix_trans(uint32_t matrix) {
  struct Operands {
    uint16_t given[2], got[2];
  } mine;
  memcpy(mine.given, &matrix, 4);
  emulator::collective("movmatrix.trans", mine, [](Operands** lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int e = 0; e < 2; ++e) {
        const int row = lane % 4 * 2 + e, column = lane / 4;
        lanes[lane]->got[e] = lanes[row * 4 + column / 2]->given[column % 2];
      }
  });
  memcpy(&matrix, mine.got, 4);
  return matrix;
}

struct E4M3Pair {
  __nv_fp8_e4m3 low, high;
};

// A number, or of two e4m3 one of them.
template <typename T>
double emulated_number(const T& value, int which) {
  if constexpr (std::is_same_v<T, E4M3Pair>) return float(which ? value.high : value.low);
  else return which ? 0.0 : float(value);
}

// mma.m16n8k16, and of pairs of e4m3 m16n8k32, whose four bytes of a lane lie as two of 16 bits: element i of a lane's A (of 8) is in row g, or g + 8 for i in {2, 3, 6, 7}, and column 2 t + i % 2, and
// 8 more for i >= 4; of its B (of 4) in row 2 t + i % 2, and 8 more for i >= 2, and column g; of its C and D (of 4) in
// row g, or g + 8 for i >= 2, and column 2 t + i % 2. Products are exact and the sum is rounded once, to Acc.
template <typename T, typename Acc, int kAccBytes>
void emulated_mma(Acc* d, const uint32_t* a, const uint32_t* b) {
  struct Operands {
    const void *a, *b;
    Acc* d;
  } mine{a, b, d};
  emulator::collective("mma.m16n8k16", mine, [](Operands** lanes) {
    double C[16][8] = {};
    for (int which = 0; which < (std::is_same_v<T, E4M3Pair> ? 2 : 1); ++which) {
    double A[16][16], B[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      T held_a[8], held_b[4];
      memcpy(held_a, lanes[lane]->a, 16), memcpy(held_b, lanes[lane]->b, 8);
      for (int i = 0; i < 8; ++i) A[g + (i % 4 >= 2 ? 8 : 0)][2 * t + i % 2 + (i >= 4 ? 8 : 0)] = emulated_number(held_a[i], which);
      for (int i = 0; i < 4; ++i) B[2 * t + i % 2 + (i >= 2 ? 8 : 0)][g] = emulated_number(held_b[i], which);
    }
    emulator::multiply_add(C, A, B);
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        Acc& d = lanes[lane]->d[i];
        d = Acc(double(float(d)) + C[lane / 4 + (i >= 2 ? 8 : 0)][2 * (lane % 4) + i % 2]);
      }
  });
}

template <typename T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulated_mma<T, float, 16>(d, a, b);
}
template <typename T>
void mma_m16n8k16(uint32_t (&d)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, __half>, "only fp16 accumulates in fp16");
  __half sums[4];
  memcpy(sums, d, 8);
  emulated_mma<T, __half, 8>(sums, a, b);
  memcpy(d, sums, 8);
}

inline uint32_t mask_or(uint32_t word, uint32_t mask, uint32_t base) { return (word & mask) | base; }

// cp.async: shared memory is NaN from here on until this thread waits for the group that the copy is in.
template <int kBytes>
void cp_async_few(void* shared, const void* global, bool inside = true) {
  emulator::check_shared("cp.async", shared, kBytes);
  if (inside) emulator::check_global("cp.async", global, kBytes);
  memset(shared, 0xff, kBytes);
  emulator::state.current->open.push_back(
      {static_cast<char*>(shared), static_cast<const char*>(inside ? global : nullptr), kBytes});
}
inline void cp_async_16(void* shared, const void* global, bool inside = true) { cp_async_few<16>(shared, global, inside); }

inline void prefetch_l2(const void*) {}

inline void cp_async_commit() {
  emulator::Thread* self = emulator::state.current;
  self->groups.push_back(std::move(self->open));
  self->open.clear();
}

// Waits until at most kPending of the youngest groups are in flight.
template <int kPending>
void cp_async_wait() {
  auto& groups = emulator::state.current->groups;
  for (; groups.size() > kPending; groups.pop_front())
    for (const emulator::Copy& copy : groups.front())
      copy.from ? (void)memcpy(copy.to, copy.from, copy.bytes) : (void)memset(copy.to, 0, copy.bytes);
}

}  // namespace minfer
