// As much of PyTorch's stable ABI as `ops/hgemm/hgemm.h` uses, so that a kernel is built without PyTorch.
#pragma once

#include <functional>
#include <optional>

#include "runtime.h"

namespace torch::headeronly {
enum class ScalarType { Half, BFloat16, Float };
enum class DeviceType { CUDA };
}

namespace torch::stable {

struct Tensor {
  char* data;
  int64_t sizes[2], strides[2];
  int bfloat16;

  int64_t dim() const { return 2; }
  int64_t size(int i) const { return sizes[i]; }
  int64_t stride(int i) const { return strides[i]; }
  int64_t numel() const { return sizes[0] * sizes[1]; }
  int get_device_index() const { return 0; }
  void* mutable_data_ptr() const { return data; }
  const void* const_data_ptr() const { return data; }
  headeronly::ScalarType scalar_type() const {
    return bfloat16 ? headeronly::ScalarType::BFloat16 : headeronly::ScalarType::Half;
  }
  size_t bytes() const {  // from the first element to behind the last
    return numel() ? 2 * ((sizes[0] - 1) * strides[0] + (sizes[1] - 1) * strides[1] + 1) : 0;
  }
};

struct Device {
  Device(headeronly::DeviceType, int) {}
};

// Memory full of NaN between guards, until the end of the call.
inline Tensor empty(std::initializer_list<int64_t> sizes, headeronly::ScalarType, std::nullopt_t, Device) {
  const size_t bytes = 4 * *sizes.begin();
  auto& region = emulator::state.scratch.emplace_back("scratch", bytes);
  return {region.begin, {*sizes.begin(), 1}, {1, 1}, 0};
}

}  // namespace torch::stable

namespace emulator {

using Function = void (*)(torch::stable::Tensor, const torch::stable::Tensor, const torch::stable::Tensor, double, double);

struct Library {
  std::map<std::string, Function> functions;
  void def(const char*) {}
  void impl(const char* name, Function function) { functions[name] = function; }
};

Library& library();

template <typename... Words>
void check(bool condition, const Words&... words) {
  std::ostringstream text;
  (text << ... << words);
  if (!condition) throw std::runtime_error(text.str());
}

}  // namespace emulator

#define STD_TORCH_CHECK(...) emulator::check(__VA_ARGS__)
#define STD_CUDA_CHECK(EXPR) emulator::check((EXPR) == cudaSuccess, "CUDA refuses " #EXPR)
#define STD_CUDA_KERNEL_LAUNCH_CHECK()
#define TORCH_BOX(FUNCTION) FUNCTION
#define EMULATOR_JOIN(A, B) A##B
#define EMULATOR_NAME(PREFIX, LINE) EMULATOR_JOIN(PREFIX, LINE)
#define EMULATOR_REGISTER(M, ID)                             \
  static void EMULATOR_NAME(fill, ID)(emulator::Library & M); \
  static const bool EMULATOR_NAME(filled, ID) = (EMULATOR_NAME(fill, ID)(emulator::library()), true); \
  static void EMULATOR_NAME(fill, ID)(emulator::Library & M)
#define STABLE_TORCH_LIBRARY_FRAGMENT(NS, M) EMULATOR_REGISTER(M, EMULATOR_NAME(fragment, __LINE__))
#define STABLE_TORCH_LIBRARY_IMPL(NS, DEVICE, M) EMULATOR_REGISTER(M, EMULATOR_NAME(implementation, __LINE__))

inline void aoti_torch_get_current_cuda_stream(int, void** stream) { *stream = nullptr; }
