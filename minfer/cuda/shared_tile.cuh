// Tiles of 16-bit elements in shared memory: the address of an element, how rows are copied to a tile, and how much shared
// memory there is.
#pragma once

#include "cuda/mma.cuh"
#include "ops/op.h"

namespace minfer {

#if MINFER_SM >= 90 && MINFER_SM < 120
constexpr int kMostShared = 227 << 10;  // bytes that a block may have
#else
constexpr int kMostShared = 99 << 10;  // of sm_86, sm_89 and sm_120
#endif

// The index of element (row, col) of a tile of kCols columns in shared memory. Eight rows at one column, which is what ldmatrix
// reads, must lie in different banks: here a row is 16 bytes longer than its columns.
template <int kCols>
struct Padded {
  static constexpr int kStride = kCols + 8;
  __device__ static int at(int row, int col) { return row * kStride + col; }
};

// The same without extra space: the order of the 16-byte pieces differs from row to row. 128 bytes cover all banks. Rows of
// whole multiples of 128 bytes begin in the same banks and have eight orders. Of rows of 64 or 192 bytes two begin in different
// banks, so that two have the same order, of four; of rows of 96 bytes four have the same, of two.
template <int kCols>
struct Swizzled {
  static constexpr int kStride = kCols, kPieces = kCols / 8;
  static constexpr int kOrders = kPieces % 8 == 0 ? 8 : kPieces % 4 == 0 ? 4 : 2, kAlike = 8 / kOrders;
  static_assert(kCols % 16 == 0);
  __device__ static constexpr int at(int row, int col) {
    const int order = row / kAlike % kOrders;
    return row * kStride + ((col / 8) ^ order) * 8 + col % 8;
  }
};

// Whether eight rows at each column lie in different banks, if the tile begins at a multiple of 128 bytes.
template <typename Place>
constexpr bool rows_in_different_banks() {
  for (int row0 = 0; row0 < 16; row0 += 8)
    for (int col = 0; col < Place::kStride; col += 8) {
      unsigned banks = 0;  // each bit is four banks, 16 bytes
      for (int row = row0; row < row0 + 8; ++row) banks |= 1u << Place::at(row, col) / 8 % 8;
      if (banks != 0xff) return false;
    }
  return true;
}

// Starts copying kRows rows of kCols elements, `stride` elements apart, to a tile, 16 bytes a thread at a time; the rows
// from `rows_left` on are zero, and are not read.
template <typename Place, int kRows, int kCols, int kThreads, typename T>
__device__ inline void copy_rows(T* tile, const T* rows, int64_t stride, int rows_left) {
  constexpr int kPieces = kCols / 8, kRowStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kRows % kRowStep == 0);
  const int row = threadIdx.x / kPieces, col = threadIdx.x % kPieces * 8;
  const T* from = rows + row * stride + col;
#pragma unroll
  for (int i = 0; i < kRows; i += kRowStep)
    cp_async_16(tile + Place::at(row + i, col), from + i * stride, row + i < rows_left);
}

// Allows a kernel that much dynamic shared memory; more than 48 KB must be asked for. Throws if this GPU has less.
template <typename Kernel>
void allow_shared(Kernel* kernel, int bytes) {
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

}  // namespace minfer
