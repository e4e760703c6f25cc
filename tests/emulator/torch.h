// As much of PyTorch's stable ABI as `ops/op.h` and the kernels use, so that a kernel is built without PyTorch; and how
// Python calls an op that was registered through it.
#pragma once

#include <functional>
#include <optional>

#include "runtime.h"

namespace torch::headeronly {
enum class ScalarType : int {  // PyTorch's own numbers, which Python sends
  Byte = 0, Char = 1, Int = 3, Long = 4, Half = 5, Float = 6, Bool = 11, BFloat16 = 15, Float8_e5m2 = 23, Float8_e4m3fn = 24
};
enum class DeviceType { CUDA };

inline int64_t item_size(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Long: return 8;
    case ScalarType::Int: case ScalarType::Float: return 4;
    case ScalarType::Half: case ScalarType::BFloat16: return 2;
    default: return 1;
  }
}
}  // namespace torch::headeronly

namespace torch::stable {

constexpr int kMostDims = 8;

struct Tensor {
  char* data;
  int64_t sizes[kMostDims], strides[kMostDims];
  int rank;
  headeronly::ScalarType dtype;

  int64_t dim() const { return rank; }
  int64_t size(int64_t i) const { return sizes[checked(i)]; }
  int64_t stride(int64_t i) const { return strides[checked(i)]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= sizes[i];
    return count;
  }
  int get_device_index() const { return 0; }
  void* mutable_data_ptr() const { return data; }
  const void* const_data_ptr() const { return data; }
  headeronly::ScalarType scalar_type() const { return dtype; }

  size_t bytes() const {  // from the first element to behind the last
    if (numel() == 0) return 0;
    int64_t last = 0;
    for (int i = 0; i < rank; ++i) last += (sizes[i] - 1) * strides[i];
    return (last + 1) * headeronly::item_size(dtype);
  }

  // Calls f(offset in bytes) for each element.
  template <typename F>
  void for_elements(F f, int dimension = 0, int64_t offset = 0) const {
    if (dimension == rank) return f(offset * headeronly::item_size(dtype));
    for (int64_t i = 0; i < sizes[dimension]; ++i) for_elements(f, dimension + 1, offset + i * strides[dimension]);
  }

 private:
  int checked(int64_t i) const {
    const int64_t dimension = i < 0 ? i + rank : i;
    if (dimension < 0 || dimension >= rank)
      throw std::runtime_error("asks for dimension " + std::to_string(i) + " of a tensor of " + std::to_string(rank));
    return static_cast<int>(dimension);
  }
};

struct Device {
  Device(headeronly::DeviceType, int) {}
};

// Memory full of NaN between guards, until the end of the call.
inline Tensor empty(std::initializer_list<int64_t> sizes, headeronly::ScalarType dtype, std::nullopt_t, Device) {
  Tensor made{nullptr, {}, {}, static_cast<int>(sizes.size()), dtype};
  std::copy(sizes.begin(), sizes.end(), made.sizes);
  int64_t stride = 1;
  for (int i = made.rank - 1; i >= 0; stride *= made.sizes[i--]) made.strides[i] = stride;
  made.data = emulator::state.scratch.emplace_back("scratch", made.bytes()).begin;
  return made;
}

}  // namespace torch::stable

namespace emulator {

// What an op is called with, in the order of its schema.
struct Argument {
  enum Kind : int { kTensor, kFloat, kInt, kBool };
  const char* name;
  Kind kind;
  int is_written;  // a tensor that the schema marks so
  double number;
  int64_t integer;
  torch::stable::Tensor tensor;
};

template <typename T>
T unbox(const Argument& argument) {
  using Value = std::remove_cv_t<T>;
  constexpr bool is_tensor = std::is_same_v<Value, torch::stable::Tensor>;
  constexpr auto kind = is_tensor                            ? Argument::kTensor
                        : std::is_same_v<Value, double>  ? Argument::kFloat
                        : std::is_same_v<Value, int64_t> ? Argument::kInt
                                                         : Argument::kBool;
  static_assert(kind != Argument::kBool || std::is_same_v<Value, bool>, "PyTorch's stable ABI has no such parameter");
  if (argument.kind != kind)
    throw std::runtime_error(std::string("the function's parameter is of another type than the schema's ") +
                             argument.name);
  if constexpr (is_tensor) return argument.tensor;
  else if constexpr (kind == Argument::kFloat) return argument.number;
  else return static_cast<Value>(argument.integer);
}

using Function = std::function<void(const Argument*, int)>;

template <typename... Parameters>
Function boxed(void (*function)(Parameters...)) {
  return [=](const Argument* arguments, int count) {
    if (count != sizeof...(Parameters))
      throw std::runtime_error("the schema has " + std::to_string(count) + " arguments, the function takes " +
                               std::to_string(sizeof...(Parameters)));
    [&]<size_t... i>(std::index_sequence<i...>) {
      function(unbox<Parameters>(arguments[i])...);
    }(std::index_sequence_for<Parameters...>());
  };
}

struct Library {
  std::map<std::string, std::string> schemas;
  std::map<std::string, Function> functions;
  void def(const std::string& schema) { schemas[schema.substr(0, schema.find('('))] = schema; }
  void impl(const char* name, Function function) { functions[name] = std::move(function); }
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
#define TORCH_BOX(FUNCTION) emulator::boxed(FUNCTION)
#define EMULATOR_JOIN(A, B) A##B
#define EMULATOR_NAME(PREFIX, LINE) EMULATOR_JOIN(PREFIX, LINE)
#define EMULATOR_REGISTER(M, ID)                             \
  static void EMULATOR_NAME(fill, ID)(emulator::Library & M); \
  static const bool EMULATOR_NAME(filled, ID) = (EMULATOR_NAME(fill, ID)(emulator::library()), true); \
  static void EMULATOR_NAME(fill, ID)(emulator::Library & M)
// By __COUNTER__, because one macro of an op may register several functions in one line.
#define STABLE_TORCH_LIBRARY_FRAGMENT(NS, M) EMULATOR_REGISTER(M, EMULATOR_NAME(fragment, __COUNTER__))
#define STABLE_TORCH_LIBRARY_IMPL(NS, DEVICE, M) EMULATOR_REGISTER(M, EMULATOR_NAME(implementation, __COUNTER__))

inline void aoti_torch_get_current_cuda_stream(int, void** stream) { *stream = nullptr; }
