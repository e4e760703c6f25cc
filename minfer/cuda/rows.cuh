// Rows of 16-byte vectors, each kept in the registers of the threads that share it: what kernels that read a row once
// have in common.
#pragma once

#include <algorithm>

#include "cuda/vector.cuh"

namespace minfer {

// Threads of a row that is kept in registers: kRowThreads where there are many rows, kMostRowThreads where there are few.
constexpr int kRowThreads = 256, kMostRowThreads = 512;

// A thread's vectors of a row: every blockDim.x-th of its `vectors`, so that a warp's are side by side; zero beyond.
template <typename T, int kVectors>
__device__ void load_row(Vector<T> (&to)[kVectors], const T* row, int vectors) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    to[i].bits = at < vectors ? reinterpret_cast<const uint4*>(row)[at] : uint4{};
  }
}

// The same of a tensor that is the same for all rows, such as a weight; what lies beyond stays as it is.
template <typename T, int kVectors>
__device__ void load_shared_row(Vector<T> (&to)[kVectors], const T* row, int vectors) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) to[i].bits = reinterpret_cast<const uint4*>(row)[at];
  }
}

// Calls f.operator()<kVectors>(blocks, threads), with the vectors of a thread, and threads.x of a row and threads.y rows
// of a block. Returns false, and calls nothing, where a row has more vectors than fit.
template <typename F>
bool in_row_registers(int rows, int vectors, int multiprocessors, F f) {
  // With few rows no SM has enough to do, and a thread should have as little as possible.
  const int most = rows <= 2 * multiprocessors ? kMostRowThreads : kRowThreads;
  const auto call = [&]<int kVectors>() {
    const int threads = (vectors + 32 * kVectors - 1) / (32 * kVectors) * 32;  // of a row
    const int of_block = std::max(1, 128 / threads);                           // rows
    f.template operator()<kVectors>((rows + of_block - 1) / of_block, dim3(threads, of_block));
    return true;
  };
  if (vectors <= most) return call.template operator()<1>();
  if (vectors <= 2 * most) return call.template operator()<2>();
  if (vectors <= 4 * most) return call.template operator()<4>();
  if (vectors <= 8 * kMostRowThreads) return call.template operator()<8>();
  return false;
}

}  // namespace minfer
