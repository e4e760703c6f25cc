// Replaces PyTorch's header of this name in `build.device_code`, as all files in this folder do. Host code is not compiled there,
// but nvcc must know what it calls in order to find which kernels it launches, and PyTorch's own headers take half of the time of
// compiling a small kernel. This is as much of them as the kernels use, declared and not defined. tests/build compares it with
// PyTorch's.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstddef>
#include <cstdint>

namespace torch::stable {

class Tensor {
 public:
  int64_t dim() const;
  int64_t numel() const;
  int64_t size(int64_t dim) const;
  int64_t stride(int64_t dim) const;
  bool is_contiguous() const;
  size_t element_size() const;
  int32_t get_device_index() const;
  void* mutable_data_ptr() const;
  const void* const_data_ptr() const;
  headeronly::ScalarType scalar_type() const;
};

}  // namespace torch::stable
