// For kernels that read a row once: rows of 16-byte vectors, each kept in the registers of the threads that share it.
#pragma once

#include <algorithm>

#include "cuda/vector.cuh"

namespace minfer {

// Threads of a row that is kept in registers: kRowThreads where there are many rows, kMostRowThreads where there are few.
constexpr int kRowThreads = 256, kMostRowThreads = 512;

// A thread's vectors of a row: every blockDim.x-th of its `vectors`, so that those of a warp are adjacent; zero beyond the row.
template <typename T, int kVectors>
__device__ void load_row(Vector<T> (&to)[kVectors], const T* row, int vectors) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    to[i].bits = at < vectors ? reinterpret_cast<const uint4*>(row)[at] : uint4{};
  }
}

// The same for a tensor that all rows share, such as a weight; vectors beyond the row are left unchanged.
template <typename T, int kVectors>
__device__ void load_shared_row(Vector<T> (&to)[kVectors], const T* row, int vectors) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) to[i].bits = reinterpret_cast<const uint4*>(row)[at];
  }
}

// Calls f.operator()<kVectors>(blocks, threads): each thread has kVectors vectors, a row has threads.x threads, and a block has
// threads.y rows. Returns false, and calls nothing, where a row has more vectors than fit.
template <typename F>
bool in_row_registers(int rows, int vectors, int multiprocessors, F f) {
  // With few rows no SM is full, and each thread should have as little work as possible.
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
