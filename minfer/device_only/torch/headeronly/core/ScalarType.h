// See torch/csrc/stable/tensor.h.
#pragma once

#include <cstdint>

namespace torch::headeronly {

enum class ScalarType : int8_t { Byte, Char, Int, Long, Half, Float, BFloat16, Float8_e5m2, Float8_e4m3fn };
enum class DeviceType : int8_t { CUDA };

}  // namespace torch::headeronly

// What is a macro in PyTorch must look at its condition and at its words here, too.
template <typename... Words>
void declared_check(bool condition, const Words&... words);
#define STD_TORCH_CHECK(...) declared_check(__VA_ARGS__)
