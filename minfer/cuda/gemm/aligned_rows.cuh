// TMA copies only rows that start at multiples of 16 bytes. If those of an operand do not, as with k = 300, these functions
// first copy it to scratch memory, with rows that do.
#pragma once

#include "cuda/counters.cuh"
#include "ops/gemm.h"

namespace minfer {

template <typename T>
bool starts_aligned(const T* matrix, int64_t ld) {
  return reinterpret_cast<uintptr_t>(matrix) % 16 == 0 && ld % 8 == 0;
}

// A copy of `rows` rows of `cols` elements, each in `pieces` pieces of 8 elements.
template <typename T>
struct RowsToAlign {
  T* to;
  const T* from;
  int64_t ld;
  int cols;
  unsigned pieces, count;  // pieces of a row, and of all rows; a count of 0 is no copy
};

// Each thread copies one piece. What is behind the end of a row is not written, and not read.
template <typename T>
__device__ inline void align_piece(const RowsToAlign<T>& rows, unsigned index) {
  const unsigned row = index / rows.pieces, piece = index - row * rows.pieces;
  const int left = rows.cols - int(piece) * 8;
  const T* from = rows.from + row * rows.ld + piece * 8;
  T* to = rows.to + int64_t(index) * 8;
  const auto address = reinterpret_cast<uintptr_t>(from);
  if (left < 8) {
#pragma unroll
    for (int i = 0; i < 7; ++i)
      if (i < left) to[i] = from[i];  //@ end_of_row
    return;
  }
  uint32_t words[4];
  if (address % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = reinterpret_cast<const uint32_t*>(from)[i];
  } else {  // three words between the first element and the last
    const auto bits = [&](int i) { return uint32_t(reinterpret_cast<const uint16_t*>(from)[i]); };
    uint32_t before = bits(0) << 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t next = i < 3 ? *reinterpret_cast<const uint32_t*>(from + 1 + 2 * i) : bits(7);
      words[i] = before >> 16 | next << 16;  //@ shifted
      before = next;
    }
  }
  *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
}

constexpr int kAligners = 256;  // threads of a block

template <typename T>
__global__ void __launch_bounds__(kAligners) align_rows(RowsToAlign<T> a, RowsToAlign<T> b) {
  const uint64_t index = uint64_t(blockIdx.x) * kAligners + threadIdx.x;
  if (index < a.count) align_piece(a, unsigned(index));
  else if (index - a.count < b.count) align_piece(b, unsigned(index - a.count));  //@ pieces_of_b
}

// Starts the copies that a product needs, and calls f(product) with them in the place of the operands. If both are copied, one
// launch does it.
template <typename T, typename F>
void with_aligned_rows(Gemm<T> g, F f) {
  const bool tn = g.layout == Layout::TN;
  const auto copied = [](bool is_aligned, const T* from, int64_t rows, int cols, int64_t ld) {
    const int64_t pieces = (int64_t(cols) + 7) / 8, count = is_aligned ? 0 : rows * pieces;
    STD_TORCH_CHECK(count <= UINT_MAX, "gemm: an operand of ", rows, " x ", cols,
                    " is too large to be copied to aligned rows; pass a tensor whose rows start at multiples of 16 bytes");
    return RowsToAlign<T>{nullptr, from, ld, cols, unsigned(pieces), unsigned(count)};
  };
  RowsToAlign<T> a = copied(starts_aligned(g.a, g.lda), g.a, g.m, g.k, g.lda);
  RowsToAlign<T> b = copied(starts_aligned(g.b, g.ldb), g.b, tn ? g.n : g.k, tn ? g.k : g.n, g.ldb);
  const uint64_t count = uint64_t(a.count) + b.count;
  if (count == 0) return f(g);
  const auto scratch = scratch_words(int64_t(count) * 4);
  a.to = static_cast<T*>(scratch.mutable_data_ptr()), b.to = a.to + int64_t(a.count) * 8;
  align_rows<<<dim3((count + kAligners - 1) / kAligners), kAligners, 0, g.stream>>>(a, b);
  if (a.count > 0) g.a = a.to, g.lda = int64_t(a.pieces) * 8;
  if (b.count > 0) g.b = b.to, g.ldb = int64_t(b.pieces) * 8;
  f(g);
}

}  // namespace minfer
