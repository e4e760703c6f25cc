// See torch/csrc/stable/tensor.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>

namespace torch::stable {

struct Device {
  Device(headeronly::DeviceType type, int32_t index);
};

Tensor empty(std::initializer_list<int64_t> size, headeronly::ScalarType dtype, std::nullopt_t layout, Device device);

}  // namespace torch::stable
