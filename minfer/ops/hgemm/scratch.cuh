// Memory that a kernel needs beside its operands.
#pragma once

#include <torch/csrc/stable/ops.h>

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

}  // namespace minfer
