// Memory that a kernel needs beside its operands.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <map>
#include <mutex>

#include "hgemm.h"

namespace minfer {

// Fp32 numbers of no value yet, of PyTorch's allocator: taken and given back in stream order, so that this may be done
// before the launch that uses them has run.
inline torch::stable::Tensor scratch(int64_t floats) {
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  return torch::stable::empty({floats}, torch::headeronly::ScalarType::Float, std::nullopt,
                              torch::stable::Device(torch::headeronly::DeviceType::CUDA, device));
}

constexpr int kMostStreams = 64, kMostTiles = 4096;  // tiles that blocks share, of a launch
constexpr int kPace = kMostTiles - 5;                // where counters of another kind are (v14_stream_k.cu)

// How many blocks have come to each shared tile. Zero before and after each launch: atomicInc itself begins anew.
// Launches that run at once must not share them, so that each stream has its own. Of two CUDA graphs that were captured
// on one stream, only one may be replayed at a time.
static __device__ unsigned arrivals[kMostStreams][kMostTiles];

// The number of a stream. Throws for more streams than there are counters for.
inline int number_of(cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<cudaStream_t, int> numbers;
  const std::lock_guard<std::mutex> lock(mutex);
  const int number = numbers.emplace(stream, static_cast<int>(numbers.size())).first->second;
  STD_TORCH_CHECK(number < kMostStreams, "hgemm: split-K kernels have counters for ", kMostStreams, " streams only");
  return number;
}

}  // namespace minfer
