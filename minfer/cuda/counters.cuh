// Counters in global memory by which the blocks of a launch meet (`cuda/grid.cuh`), and scratch memory.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <deque>
#include <map>
#include <mutex>

#include "ops/op.h"

namespace minfer {

constexpr int kMostCounters = 4096;     // of a launch
constexpr int kArrays = 64;             // of so many counters, in one allocation
constexpr size_t kMostCaptures = 4096;  // that have counters of their own

// Memory that is full of zeros when this returns. It may be called during a capture, which records nothing of it.
inline unsigned* zeroed_words(size_t words) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // in which CUDA allows these calls
  STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  void* memory = nullptr;
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMalloc(&memory, words * sizeof(unsigned));
  if (error == cudaSuccess) error = cudaMemsetAsync(memory, 0, words * sizeof(unsigned), stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (stream) cudaStreamDestroy(stream);
  cudaThreadExchangeStreamCaptureMode(&mode);
  STD_CUDA_CHECK(error);
  return static_cast<unsigned*>(memory);
}

// The counters of a launch on this stream: zero before it and after it, but for their highest bits, which the barrier of
// `grid.cuh` flips. Launches that run at once must not share them. So each stream of a device has its own, and other ones in
// each capture of a CUDA graph; after kMostCaptures captures the oldest one's are used again. The function is static, so that
// each kernel's library has its own: not all kernels expect a set highest bit.
static inline unsigned* counters_of(cudaStream_t stream) {
  using Key = std::pair<unsigned long long, cudaStream_t>;  // a capture, or 0 outside of captures
  struct OfDevice {
    std::map<Key, unsigned*> counters;
    std::deque<Key> captures;  // the oldest first
    unsigned* slab = nullptr;
    int left = 0;  // in the slab
  };
  static std::mutex mutex;
  static std::map<int, OfDevice> of_devices;
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  Key key{0, stream};
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &key.first);
  if (error == cudaErrorStreamCaptureImplicit) cudaGetLastError();  // the legacy stream, while another one is captured
  else STD_CUDA_CHECK(error);
  if (error != cudaSuccess || status != cudaStreamCaptureStatusActive) key.first = 0;

  const std::lock_guard<std::mutex> lock(mutex);
  OfDevice& of = of_devices[device];
  if (const auto found = of.counters.find(key); found != of.counters.end()) return found->second;
  unsigned* counters;
  if (key.first != 0 && of.captures.size() == kMostCaptures) {
    counters = of.counters.extract(of.captures.front()).mapped();
    of.captures.pop_front();
  } else {
    if (of.left == 0) of.slab = zeroed_words(size_t(kArrays) * kMostCounters), of.left = kArrays;
    counters = of.slab + --of.left * kMostCounters;
  }
  if (key.first != 0) of.captures.push_back(key);
  return of.counters[key] = counters;
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
