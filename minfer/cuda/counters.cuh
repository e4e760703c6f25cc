// Counters in global memory by which the blocks of a launch meet (`cuda/grid.cuh`), and scratch memory.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <map>
#include <mutex>

#include "ops/op.h"

namespace minfer {

constexpr int kMostStreams = 64, kMostTeams = 1024;  // of a launch: groups of blocks, each with its own barrier

// Launches that run at once must not share counters, so each stream has its own. Of two CUDA graphs that were captured on one
// stream, only one may be replayed at a time.
static __device__ unsigned arrivals[kMostStreams][kMostTeams];

// The number of a stream. Throws for more streams than there are counters for.
inline int number_of(cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<cudaStream_t, int> numbers;
  const std::lock_guard<std::mutex> lock(mutex);
  const int number = numbers.emplace(stream, static_cast<int>(numbers.size())).first->second;
  STD_TORCH_CHECK(number < kMostStreams, "minfer: kernels whose blocks meet have counters for ", kMostStreams,
                  " streams only");
  return number;
}

// Uninitialised 32-bit words of PyTorch's allocator. They are taken and freed in stream order, so the host may free them before
// the launch that uses them has run.
inline torch::stable::Tensor scratch_words(int64_t words) {
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  return torch::stable::empty({words}, ScalarType::Int, std::nullopt,
                              torch::stable::Device(torch::headeronly::DeviceType::CUDA, device));
}

}  // namespace minfer
