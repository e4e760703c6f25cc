// What the CUDA kernels of `producer_consumer` share: tiles, who takes which, and the work on 16 bytes.
#pragma once

#include <algorithm>

#include "stream.h"

namespace minfer {

constexpr int kThreads = 256;                 // that compute
constexpr int kPieces = 2;                    // of 16 bytes, of a thread in a tile
constexpr int kTile = kThreads * kPieces * 4;  // elements
constexpr int kBlocksPerSM = 2;  // few, as in a kernel with large tiles: other blocks hide little of the waiting

// The tiles of a block are every gridDim.x-th.
__device__ inline int tiles_of_block(int n) {
  const int tiles = (n - 1) / kTile + 1;
  return (tiles - int(blockIdx.x) - 1) / int(gridDim.x) + 1;
}

// Where piece `i` of this thread lies in the tensor, in the `number`th tile of its block. Beyond n there is none.
__device__ inline int64_t place_of(int number, int i, int thread) {
  return (int64_t(blockIdx.x) + int64_t(number) * gridDim.x) * kTile + (i * kThreads + thread) * 4;
}

// All steps of a thread's pieces: 8 chains that do not wait for each other.
__device__ inline void compute(float4 (&pieces)[kPieces], int steps) {
#pragma unroll 4
  for (int step = 0; step < steps; ++step)
#pragma unroll
    for (float4& p : pieces) {
      p.x = (1.0f - kRate) * p.x + kRate, p.y = (1.0f - kRate) * p.y + kRate;
      p.z = (1.0f - kRate) * p.z + kRate, p.w = (1.0f - kRate) * p.w + kRate;
    }
}

__device__ inline void store(const Stream& s, const float4 (&pieces)[kPieces], int number) {
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
    if (const int64_t at = place_of(number, i, threadIdx.x); at < s.n) *reinterpret_cast<float4*>(s.y + at) = pieces[i];
}

// A launch of as many blocks as are to run at once, or as there are tiles.
template <typename Kernel>
void launch_blocks(const Stream& s, Kernel kernel, int threads) {
  check_pieces(s.x, s.n, s.n, "producer_consumer: x");
  check_pieces(s.y, s.n, s.n, "producer_consumer: y");
  const int blocks = std::min((s.n - 1) / kTile + 1, kBlocksPerSM * multiprocessors());
  kernel<<<blocks, threads, 0, s.stream>>>(s);
}

}  // namespace minfer
