// A block, or a part of one, sums up a sequence once: for any length, or with a size that is compiled in.
#pragma once

#include <algorithm>

#include "cuda/vector.cuh"
#include "seq_sum.h"

namespace minfer {

constexpr int kBlock = 128;  // threads of a block at least: with fewer for a sequence, it takes several sequences

// How many elements lie before the first that starts at a multiple of 16 bytes.
template <typename T>
__device__ int before_vectors(const T* row, int count) {
  const int bytes = static_cast<int>(-reinterpret_cast<uintptr_t>(row) & 15);
  return min(static_cast<int>(bytes / sizeof(T)), count);
}

template <typename T>
__device__ float sum_of(const Vector<T>& vector) {
  float values[Vector<T>::kCount], sum = 0.0f;
  vector.unpack(values);
#pragma unroll
  for (float value : values) sum += value;
  return sum;
}

// This thread's part of the sum: vectors where they are aligned, single elements before and after them. kLongest, unless it is
// 0, is the longest expected sequence, whose loads are all in flight at once; longer ones are computed too.
template <int kThreads, int kLongest, typename T>
__device__ float part_of(const T* x, int length) {
  constexpr int kCount = Vector<T>::kCount, kSteps = (kLongest / kCount + kThreads - 1) / kThreads;
  const int thread = threadIdx.x, head = before_vectors(x, length), vectors = (length - head) / kCount;
  const int tail = head + vectors * kCount;
  const uint4* aligned = reinterpret_cast<const uint4*>(x + head);
  float sum = 0.0f;
  if (thread < head) sum += float(x[thread]);
  if (tail + thread < length) sum += float(x[tail + thread]);  //@ tail
  if constexpr (kSteps > 0) {
    Vector<T> pieces[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int at = thread + i * kThreads;
      if (at < vectors) pieces[i].bits = aligned[at];
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) sum += sum_of(pieces[i]);
  }
#pragma unroll 4
  for (int at = thread + kSteps * kThreads; at < vectors; at += kThreads) sum += sum_of(Vector<T>(aligned[at]));
  return sum;
}

// The elements from `from` to `to` of a row become `value`; the threads of a sequence share them.
template <int kThreads, typename T>
__device__ void fill(T* row, int from, int to, T value) {
  constexpr int kCount = Vector<T>::kCount;
  const int thread = threadIdx.x, count = to - from;
  T* y = row + from;
  const int head = before_vectors(y, count), vectors = (count - head) / kCount, tail = head + vectors * kCount;
  float values[kCount];
#pragma unroll
  for (float& each : values) each = float(value);
  const uint4 bits = Vector<T>(values).bits;
  if (thread < head) y[thread] = value;
  if (tail + thread < count) y[tail + thread] = value;
  for (int at = thread; at < vectors; at += kThreads) reinterpret_cast<uint4*>(y + head)[at] = bits;
}

// Each sequence has kThreads threads, a multiple of 32, and each block kSequences sequences: blockDim is (kThreads,
// kSequences). Shared memory is a word for each warp, none where one warp sums a sequence alone.
template <int kThreads, int kSequences, int kLongest, typename T>
__global__ void __launch_bounds__(kThreads * kSequences) sum_sequences(SeqSum<T> p) {
  __shared__ float partial[kThreads == 32 ? 1 : kThreads / 32 * kSequences];
  const int number = blockIdx.x * kSequences + threadIdx.y;
  const Sequence<T> s = number < p.count() ? p.sequence(number) : Sequence<T>{p.y, p.x, 0, 0};  //@ sequence
  const float sum = reduce_row(part_of<kThreads, kLongest>(s.x, s.length), partial);
  fill<kThreads>(s.y, 0, s.length, T(sum));
  fill<kThreads>(s.y, s.length, s.room, T(0.0f));
}

// With kThreads threads a sequence. kLongest 0: no length is expected.
template <int kThreads, int kLongest, typename T>
void launch_block(const SeqSum<T>& p) {
  static_assert(kThreads % 32 == 0 && kThreads >= 32 && kThreads <= 1024, "whole warps, at most 1024 threads");
  static_assert(kLongest <= 16 * 16 / int(sizeof(T)) * kThreads, "at most 16 loads at once: 64 registers");
  constexpr int kSequences = std::max(1, kBlock / kThreads);
  const int blocks = (p.count() + kSequences - 1) / kSequences;
  sum_sequences<kThreads, kSequences, kLongest><<<blocks, dim3(kThreads, kSequences), 0, p.stream>>>(p);
}

}  // namespace minfer
