// For kernels that read a row once, of any length: a thread keeps its pieces of the row in registers from its loads to its
// stores. A piece is a `Vector` of 16 bytes, or an `Element` where the length of a row is no multiple of 16 bytes.
#pragma once

#include <algorithm>

#include "cuda/load_if.cuh"
#include "cuda/vector.cuh"

namespace minfer {

constexpr int kMostThreadsOfRow = 512, kMostPieces = 8;

// One element of T, with the members of a Vector.
template <typename T>
struct Element {
  static constexpr int kCount = 1;
  T bits{};

  __device__ Element() {}
  __device__ Element(const float (&values)[1]) : bits(T(values[0])) {}
  __device__ void unpack(float (&values)[1]) const { values[0] = float(bits); }
  __device__ void stay_packed() {}
};

template <typename Piece>
using BitsOf = decltype(Piece::bits);

template <typename Piece, typename T>
__device__ const BitsOf<Piece>* pieces_of(const T* row) {
  return reinterpret_cast<const BitsOf<Piece>*>(row);
}

// Loads a thread's pieces of a row: every blockDim.x-th of its `pieces`, so that those of a warp are adjacent. Pieces beyond
// the row are zero. Vectors bypass the L1, so that it keeps the tensors that all rows share.
template <typename Piece, int kPieces, typename T>
__device__ void load_pieces(Piece (&to)[kPieces], const T* row, int pieces) {
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    to[i].bits = BitsOf<Piece>{};
    if constexpr (Piece::kCount > 1) load_if(to[i].bits, pieces_of<Piece>(row) + at, at < pieces);
    else if (at < pieces) to[i].bits = row[at];
  }
}

// The same for a tensor that all rows share, such as a weight. Pieces beyond the row are left unchanged.
template <typename Piece, int kPieces, typename T>
__device__ void load_shared_pieces(Piece (&to)[kPieces], const T* row, int pieces) {
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < pieces) to[i].bits = pieces_of<Piece>(row)[at];
  }
}

}  // namespace minfer
