// Products of any sizes at any addresses by mma.sync, with a bias and an activation on the sums in registers.
#pragma once

#include "cuda/gemm/biased_mma.cuh"

namespace minfer {

// How a block brings tile after tile of one operand to shared memory: each thread loads its elements of the next tile into
// registers, and stores them later. Where all rows start at multiples of 16 bytes it moves pieces of 16 bytes, else single
// elements, those of neighbouring threads side by side. What is outside of the matrix is zero and is not read.
// The tiles go on along the columns of a row-major matrix or, kDown, down its rows.
template <typename Place, bool kDown, int kRows, int kCols, int kThreads, typename T>
struct TileByRegisters {
  static constexpr int kRowStep = kThreads / kCols, kRowStepOfPieces = 8 * kRowStep;  // from a thread's row to its next
  static_assert(kThreads % kCols == 0 && kRows % kRowStepOfPieces == 0);

  const T* source;           // this thread's first element of the next tile
  int64_t ld;                // elements from row to row
  int rows_left, cols_left;  // from there to the end of the matrix
  int at;                    // where the element goes
  bool by_pieces;
  uint32_t held[kRows / kRowStep];  // an element each; or four for each piece

  // The first tile starts at (row0, col0) of a rows x cols matrix.
  __device__ TileByRegisters(const T* matrix, int64_t ld, int row0, int col0, int rows, int cols) : ld(ld) {
    by_pieces = reinterpret_cast<uintptr_t>(matrix) % 16 == 0 && ld % 8 == 0;  //@ by_pieces
    const int first = threadIdx.x * (by_pieces ? 8 : 1), row = first / kCols, col = first % kCols;
    source = matrix + (row0 + row) * ld + col0 + col;
    rows_left = rows - row0 - row, cols_left = cols - col0 - col;
    at = Place::at(row, col);
  }

  __device__ static uint32_t bits(const T* element) { return *reinterpret_cast<const uint16_t*>(element); }

  __device__ void load() {
    const T* from = source;
    if (by_pieces) {
#pragma unroll
      for (int i = 0; i < kRows / kRowStepOfPieces; ++i, from += kRowStepOfPieces * ld) {
        uint4 words{};
        if (i * kRowStepOfPieces < rows_left) {  //@ row_of_piece
          if (cols_left >= 8) {  //@ whole_piece
            words = *reinterpret_cast<const uint4*>(from);
          } else {
#pragma unroll
            for (int e = 0; e < 7; ++e)
              if (e < cols_left) (&words.x)[e / 2] |= bits(from + e) << e % 2 * 16;  //@ end_of_row
          }
        }
        held[4 * i] = words.x, held[4 * i + 1] = words.y, held[4 * i + 2] = words.z, held[4 * i + 3] = words.w;
      }
    } else if (rows_left > kRows - kRowStep && cols_left > 0) {  //@ whole_rows
#pragma unroll
      for (int i = 0; i < kRows / kRowStep; ++i, from += kRowStep * ld) held[i] = bits(from);
    } else {
#pragma unroll
      for (int i = 0; i < kRows / kRowStep; ++i, from += kRowStep * ld)
        held[i] = i * kRowStep < rows_left && cols_left > 0 ? bits(from) : 0;  //@ end_of_elements
    }
    source += kDown ? kRows * ld : kCols;
    (kDown ? rows_left : cols_left) -= kDown ? kRows : kCols;
  }

  __device__ void store(T* tile) const {
    if (by_pieces) {
#pragma unroll
      for (int i = 0; i < kRows / kRowStepOfPieces; ++i)
        *reinterpret_cast<uint4*>(tile + at + i * kRowStepOfPieces * Place::kStride) =
            uint4{held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3]};
    } else {
#pragma unroll
      for (int i = 0; i < kRows / kRowStep; ++i)
        *reinterpret_cast<uint16_t*>(tile + at + i * kRowStep * Place::kStride) = uint16_t(held[i]);
    }
  }
};

// Padded tiles, in which an element lies at a fixed offset from the thread's first one.
template <typename T, Layout kLayout>
struct Anywhere : BlockTile<T, float, kLayout, 64, 64, 32, 2, 32, 32> {
  using Base = BlockTile<T, float, kLayout, 64, 64, 32, 2, 32, 32>;
  using PlaceA = Padded<Base::kBlockK>;
  using PlaceB = Padded<Base::kBCols>;
  static constexpr int kA = Base::kBlockM * PlaceA::kStride, kStage = kA + Base::kBRows * PlaceB::kStride;
};

template <typename Block, typename Activation>
__global__ void __launch_bounds__(Block::kThreads)
    multiply_anywhere(Biased<typename Block::T> g, Activation activation) {
  using T = typename Block::T;
  using Warp = typename Block::Warp;
  using A = typename Block::PlaceA;
  using B = typename Block::PlaceB;
  constexpr bool kTN = Block::kTN;
  constexpr int kBlockM = Block::kBlockM, kBlockN = Block::kBlockN, kBlockK = Block::kBlockK;
  __shared__ alignas(16) T stages[2 * Block::kStage];

  const int2 place = tile_of(blockIdx.x, (g.m + kBlockM - 1) / kBlockM, (g.n + kBlockN - 1) / kBlockN);
  const int row0 = place.x * kBlockM, col0 = place.y * kBlockN;
  TileByRegisters<A, false, kBlockM, kBlockK, Block::kThreads, T> a(g.a, g.lda, row0, 0, g.m, g.k);
  TileByRegisters<B, !kTN, Block::kBRows, Block::kBCols, Block::kThreads, T> b(
      g.b, g.ldb, kTN ? col0 : 0, kTN ? 0 : col0, kTN ? g.n : g.k, kTN ? g.k : g.n);
  Warp warp;
  a.load(), b.load();
  for (int tile = 0; tile < (g.k + kBlockK - 1) / kBlockK; ++tile) {
    T* stage = stages + tile % 2 * Block::kStage;  //@ stage
    a.store(stage), b.store(stage + Block::kA);
    __syncthreads();  //@ stored
    a.load(), b.load();  // the next tile, under the products of this one; after the last tile, load() reads nothing
    typename Warp::Fragments fragments[kBlockK / 16];
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step)
      Warp::template load<A, B>(fragments[step], stage, stage + Block::kA, Block::warp_row(), Block::warp_col(),
                                step * 16);
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) warp.multiply(fragments[step]);
  }

  const int row = row0 + Block::warp_row() + threadIdx.x % 32 / 4;
  const int col = col0 + Block::warp_col() + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < int(sizeof(warp.sums[0]) / sizeof(warp.sums[0][0])); ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = col + j * 8 + e;
      if (at >= g.n) continue;  //@ last_column
      const float bias = float(g.bias[at]);  //@ bias_of_sum
#pragma unroll
      for (int i = 0; i < int(sizeof(warp.sums) / sizeof(warp.sums[0])); ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (const int of = row + i * 16 + half * 8; of < g.m)  //@ last_row
            g.c[of * g.ldc + at] = T(activation(warp.sums[i][j][2 * half + e] + bias));
    }
}

template <typename Block, typename T, typename Activation>
void launch_block(const Biased<T>& g, Activation activation) {
  const int64_t grid = tiles_of<Block>(g);
  STD_TORCH_CHECK(grid <= INT_MAX, MINFER_BIASED ": more output tiles than a launch has blocks");
  multiply_anywhere<Block><<<dim3(grid), Block::kThreads, 0, g.stream>>>(g, activation);
}

template <typename T, typename Activation>
void launch_anywhere(const Biased<T>& g, Activation activation) {
  if (g.layout == Layout::TN) return launch_block<Anywhere<T, Layout::TN>>(g, activation);
  launch_block<Anywhere<T, Layout::NN>>(g, activation);
}

}  // namespace minfer
