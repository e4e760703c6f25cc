// What one warp multiplies with mma.sync, shared by hgemm's rungs from v04 on and others: its fragments, its sums, and its
// epilogue.
#pragma once

#include "cuda/mma.cuh"
#include "cuda/shared_tile.cuh"
#include "ops/gemm.h"

namespace minfer {

// Throws unless 16 bytes at once may be read of each row of a and b, and written of c, and Acc can add up T.
template <typename T, typename Acc>
void require_vectors(const Gemm<T>& g) {
  const auto fits = [](const void* p, int64_t ld) { return reinterpret_cast<uintptr_t>(p) % 16 == 0 && ld % 8 == 0; };
  STD_TORCH_CHECK(g.n % 8 == 0 && g.k % 8 == 0, "gemm: n and k must be multiples of 8, got ", g.n, " and ", g.k);
  STD_TORCH_CHECK(fits(g.a, g.lda) && fits(g.b, g.ldb) && fits(g.c, g.ldc),
                  "gemm: rows must start at multiples of 16 bytes; copy the operands to a contiguous tensor");
  STD_TORCH_CHECK((std::is_same_v<Acc, float> || std::is_same_v<T, Half>), "gemm: only fp16 accumulates in fp16");
}

// How a block copies tile after tile of one operand to shared memory: each thread the same 16-byte pieces of each tile.
// What is outside of the matrix is zero. The tiles go on along the columns of a row-major matrix or, kDown, down its rows.
template <typename Place, bool kDown, int kRows, int kCols, int kThreads, typename T>
struct TileCopy {
  static constexpr int kPieces = kCols / 8, kRowStep = kThreads / kPieces;
  static constexpr int kRest = kRows % kRowStep;  // the last rows: the first kRest * kPieces threads copy a piece each
  static_assert(kThreads % kPieces == 0 && !(kDown && kRest > 0));

  const T* source;           // this thread's first piece of the next tile
  int64_t row_step;          // elements from there to its next piece
  int rows_left, cols_left;  // from there to the end of the matrix
  int at;                    // where the piece goes; the next ones lie whole turns of the swizzle below it
  static_assert(kRowStep % 8 == 0);

  // The first tile starts at (row0, col0) of a rows x cols matrix.
  __device__ TileCopy(const T* matrix, int64_t ld, int row0, int col0, int rows, int cols) {
    const int row = threadIdx.x / kPieces, col = threadIdx.x % kPieces * 8;
    source = matrix + (row0 + row) * ld + col0 + col;
    row_step = kRowStep * ld;
    rows_left = rows - row0 - row, cols_left = cols - col0 - col;
    at = Place::at(row, col);
  }

  // Starts the copies of the next tile.
  __device__ void start(T* tile) {
#pragma unroll
    for (int i = 0; i < kRows / kRowStep; ++i)
      cp_async_16(tile + at + i * kRowStep * Place::kStride, source + i * row_step,
                  i * kRowStep < rows_left && cols_left > 0);  //@ edge_copies
    if constexpr (kRest > 0) {
      constexpr int below = kRows - kRest;
      const bool copies = threadIdx.x / kPieces < kRest;  //@ rest_of_rows
      if (copies)
        cp_async_16(tile + at + below * Place::kStride, source + kRows / kRowStep * row_step,
                    below < rows_left && cols_left > 0);
    }
    source += kDown ? kRows / kRowStep * row_step : kCols;
    (kDown ? rows_left : cols_left) -= kDown ? kRows : kCols;
  }
};

// kWarpM x kWarpN of the product. Tiles of A lie [m][k] in shared memory, of B [n][k] in TN and [k][n] in NN.
template <typename T, typename Acc, Layout kLayout, int kWarpM, int kWarpN>
struct WarpTile {
  static constexpr bool kHalfSums = std::is_same_v<Acc, Half>;
  using Sums = std::conditional_t<kHalfSums, uint32_t[2], float[4]>;  // of a thread, for 16x8 of the product

  struct alignas(4) Pair {
    T x, y;
  };

  using FragmentsA = uint32_t[kWarpM / 16][4];
  using FragmentsB = uint32_t[kWarpN / 8][2];
  struct Fragments {
    FragmentsA a;
    FragmentsB b;
  };

  Sums sums[kWarpM / 16][kWarpN / 8] = {};

  // Of 128 columns there is no room for the next fragments beside the current ones: they come in parts, each to the place
  // of one that has been multiplied.
  static constexpr int kParts = kWarpN > 64 ? 4 : 1, kPart = kWarpN / 8 / kParts;

  // The fragments of 16 steps in k, from k on, of the warp's rows and columns of the block's tiles.
  template <typename PlaceA, typename PlaceB>
  __device__ static void load(Fragments& f, const T* a_tile, const T* b_tile, int row, int col, int k) {
    const int lane = threadIdx.x % 32;
    load_a<PlaceA>(f, a_tile, row, k, lane);
#pragma unroll
    for (int part = 0; part < kParts; ++part) load_b<PlaceB>(f, b_tile, col, k, part, lane);
  }

  template <typename Place>
  __device__ static void load_a(Fragments& f, const T* tile, int row, int k, int lane) {
#pragma unroll
    for (int i = 0; i < kWarpM / 16; ++i)
      ldmatrix_x4(f.a[i], tile + Place::at(row + i * 16 + lane % 16, k + lane / 16 * 8));  //@ a_place
  }

  template <typename Place>
  __device__ static void load_b(Fragments& f, const T* tile, int col, int k, int part, int lane) {
#pragma unroll
    for (int j = part * kPart / 2; j < (part + 1) * kPart / 2; ++j) {
      uint32_t two[4];  // 16 columns
      if constexpr (kLayout == Layout::TN)
        ldmatrix_x4(two, tile + Place::at(col + j * 16 + lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 8));
      else
        ldmatrix_x4_trans(two, tile + Place::at(k + lane % 16, col + j * 16 + lane / 16 * 8));  //@ transposed
      f.b[2 * j][0] = two[0], f.b[2 * j][1] = two[1], f.b[2 * j + 1][0] = two[2], f.b[2 * j + 1][1] = two[3];
    }
  }

  __device__ void multiply(const Fragments& f) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) multiply(f.a, f.b, part);
  }

  __device__ void multiply(const FragmentsA& a, const FragmentsB& b, int part) {
#pragma unroll
    for (int i = 0; i < kWarpM / 16; ++i)
#pragma unroll
      for (int n = 0; n < kPart; ++n) {
        const int j = part * kPart + (i % 2 ? kPart - 1 - n : n);  // there and back: the next product finds b in place
        mma_m16n8k16<T>(sums[i][j], a[i], b[j]);
      }
  }

  __device__ static float value(const Sums& sums, int element) {
    if constexpr (kHalfSums) {
      __half_raw raw;
      raw.x = static_cast<unsigned short>(sums[element / 2] >> (element % 2 * 16));
      return float(Half(raw));
    } else {
      return sums[element];
    }
  }

  // c = alpha sums + beta c for the warp's rows and columns from (row0, col0) on. A thread holds pairs of columns.
  __device__ void store(const Gemm<T>& g, int row0, int col0) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kWarpM / 16; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + i * 16 + half * 8 + lane / 4;
        if (row >= g.m) continue;
        T* c_row = g.c + row * g.ldc;
#pragma unroll
        for (int j = 0; j < kWarpN / 8; ++j) {
          const int col = col0 + j * 8 + lane % 4 * 2;
          if (col >= g.n) continue;
          Pair* c = reinterpret_cast<Pair*>(c_row + col);
          float x = g.alpha * value(sums[i][j], 2 * half), y = g.alpha * value(sums[i][j], 2 * half + 1);
          if (g.beta != 0.0f) {
            const Pair before = *c;
            x += g.beta * float(before.x), y += g.beta * float(before.y);
          }
          *c = Pair{T(x), T(y)};
        }
      }
  }

  static constexpr int kStaged = 16 * Padded<kWarpN>::kStride;  // elements that `store_rows` needs

  // The same without beta and by way of shared memory of the warp's own, so that eight lanes write a row of 128 bytes.
  __device__ void store_rows(const Gemm<T>& g, int row0, int col0, T* staged) const {
    using Place = Padded<kWarpN>;
    const int lane = threadIdx.x % 32;
    constexpr int kPieces = kWarpN / 8;
#pragma unroll
    for (int i = 0; i < kWarpM / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kWarpN / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float x = g.alpha * value(sums[i][j], 2 * half), y = g.alpha * value(sums[i][j], 2 * half + 1);
          const int at = Place::at(half * 8 + lane / 4, j * 8 + lane % 4 * 2);
          *reinterpret_cast<Pair*>(staged + at) = Pair{T(x), T(y)};
        }
      __syncwarp();
#pragma unroll
      for (int p = 0; p < 16 * kPieces / 32; ++p) {
        const int row = (p * 32 + lane) / kPieces, col = (p * 32 + lane) % kPieces * 8;
        if (row0 + i * 16 + row < g.m && col0 + col < g.n)
          *reinterpret_cast<uint4*>(g.c + (row0 + i * 16 + row) * g.ldc + col0 + col) =
              *reinterpret_cast<const uint4*>(staged + Place::at(row, col));
      }
      __syncwarp();
    }
  }
};

}  // namespace minfer
