// How a CUDA or C++ function becomes a torch op, whatever tensors and scalars it takes: through PyTorch's stable ABI.
//
// A kernel file, or the header of its op, defines a function that takes what its schema lists, in that order: each
// tensor as `minfer::Tensor`, a float as `double`, an int as `int64_t`, a bool as `bool`; and registers it:
//
//     static void rmsnorm_v01_naive(Tensor y, const Tensor x, const Tensor weight, double eps) { ... }
//     MINFER_OP(rmsnorm_v01_naive, "(Tensor(a!) y, Tensor x, Tensor weight, float eps=1e-6) -> ()")
//
// `(a!)` marks a tensor that the function writes. Checks throw one sentence, which begins with the `who` that they are
// given: the op and the tensor, such as "rmsnorm: x".
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <climits>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/stable/macros.h>
#endif

namespace minfer {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// --- Dtypes ----------------------------------------------------------------------------------------------------------

// MINFER_EITHER marks functions that kernels of both devices call.
#ifdef __CUDACC__
using Half = __half;
using BFloat16 = __nv_bfloat16;
#define MINFER_DEVICE CUDA
#define MINFER_EITHER __host__ __device__
#else
using Half = torch::headeronly::Half;
using BFloat16 = torch::headeronly::BFloat16;
#define MINFER_DEVICE CPU
#define MINFER_EITHER
#endif

// Bytes, which a kernel that computes with them casts to the types of <cuda_fp8.h>: most kernels need not compile it.
enum class Float8E4M3 : uint8_t {};
enum class Float8E5M2 : uint8_t {};

template <typename T>
constexpr ScalarType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return ScalarType::Float;
  else if constexpr (std::is_same_v<T, Half>) return ScalarType::Half;
  else if constexpr (std::is_same_v<T, BFloat16>) return ScalarType::BFloat16;
  else if constexpr (std::is_same_v<T, Float8E4M3>) return ScalarType::Float8_e4m3fn;
  else if constexpr (std::is_same_v<T, Float8E5M2>) return ScalarType::Float8_e5m2;
  else if constexpr (std::is_same_v<T, int8_t>) return ScalarType::Char;
  else if constexpr (std::is_same_v<T, uint8_t>) return ScalarType::Byte;
  else if constexpr (std::is_same_v<T, int32_t>) return ScalarType::Int;
  else if constexpr (std::is_same_v<T, int64_t>) return ScalarType::Long;
  else static_assert(sizeof(T) == 0, "add its dtype above");
}

// As Python names it.
inline const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    default: return "a dtype that minfer has no kernels for";
  }
}

// Calls f.operator()<T>() with the one of Ts that has the dtype; throws if none has:
//     dispatch<float, Half, BFloat16>(x.scalar_type(), "rmsnorm: x", [&]<typename T>() { launch<T>(...); });
template <typename... Ts, typename F>
void dispatch(ScalarType dtype, const char* who, F f) {
  const bool found = ((dtype == dtype_of<Ts>() && (f.template operator()<Ts>(), true)) || ...);
  std::string names;
  if (!found) ((names += (names.empty() ? "" : " or ") + std::string(name_of(dtype_of<Ts>()))), ...);
  STD_TORCH_CHECK(found, who, " must be ", names, ", got ", name_of(dtype));
}

// --- Checks ----------------------------------------------------------------------------------------------------------

inline void check_rank(const Tensor& tensor, const char* who, int64_t rank) {
  STD_TORCH_CHECK(tensor.dim() == rank, who, " must have ", rank, " dimensions, got ", tensor.dim());
}

// The rank and each size.
inline void check_sizes(const Tensor& tensor, const char* who, std::initializer_list<int64_t> sizes) {
  check_rank(tensor, who, static_cast<int64_t>(sizes.size()));
  int64_t dim = 0;
  for (const int64_t size : sizes) {
    STD_TORCH_CHECK(tensor.size(dim) == size, who, " must have size ", size, " in dimension ", dim, ", got ",
                    tensor.size(dim));
    ++dim;
  }
}

inline void check_dtype(const Tensor& tensor, const char* who, ScalarType dtype) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, who, " must be ", name_of(dtype), ", got ",
                  name_of(tensor.scalar_type()));
}

// The elements of the last dimension lie side by side; rows may lie apart.
inline void check_rows(const Tensor& tensor, const char* who) {
  const int64_t last = tensor.dim() - 1;
  STD_TORCH_CHECK(last < 0 || tensor.stride(last) == 1 || tensor.size(last) <= 1, who,
                  " must be contiguous in its last dimension, which has stride ", last < 0 ? 1 : tensor.stride(last));
}

inline void check_contiguous(const Tensor& tensor, const char* who) {
  int64_t expected = 1;
  for (int64_t dim = tensor.dim() - 1; dim >= 0; expected *= tensor.size(dim--))
    STD_TORCH_CHECK(tensor.numel() == 0 || tensor.size(dim) == 1 || tensor.stride(dim) == expected, who,
                    " must be contiguous, but dimension ", dim, " has stride ", tensor.stride(dim));
}

// Rows of `count` elements, `stride` elements apart, can be read and written `bytes` at a time.
template <typename T>
void check_pieces(const T* rows, int64_t count, int64_t stride, const char* who, int64_t bytes = 16) {
  const int64_t piece = bytes / static_cast<int64_t>(sizeof(T));
  STD_TORCH_CHECK(count % piece == 0, who, " must have a multiple of ", piece, " elements in a row, got ", count);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(rows) % bytes == 0 && stride % piece == 0, who,
                  " must have rows that start at multiples of ", bytes, " bytes; copy it to a contiguous tensor");
}

// A size as an int, which kernels compute with.
inline int to_int(int64_t size, const char* who) {
  STD_TORCH_CHECK(size >= 0 && size <= INT_MAX, who, " must have sizes that fit 32 bits, got ", size);
  return static_cast<int>(size);
}

// --- What a kernel is given ------------------------------------------------------------------------------------------

// A tensor's elements; throws unless T is their type.
template <typename T>
const T* input(const Tensor& tensor, const char* who) {
  check_dtype(tensor, who, dtype_of<T>());
  return static_cast<const T*>(tensor.const_data_ptr());
}

// The same of a tensor that the schema marks as written.
template <typename T>
T* output(const Tensor& tensor, const char* who) {
  check_dtype(tensor, who, dtype_of<T>());
  return static_cast<T*>(tensor.mutable_data_ptr());
}

#ifdef __CUDACC__
// PyTorch's current stream of the tensor's device.
inline cudaStream_t stream_of(const Tensor& tensor) {
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream);
  return static_cast<cudaStream_t>(stream);
}

// How many SMs the current GPU has. Throws where CUDA does not say.
inline int multiprocessors() {
  int device = 0, count = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}
#endif

// After the launches of a call: throws what CUDA has against them. On a CPU there is nothing to ask.
inline void check_launch() {
#ifdef __CUDACC__
  STD_CUDA_KERNEL_LAUNCH_CHECK();
#endif
}

}  // namespace minfer

// Registers the function NAME as the torch op minfer::NAME, under a schema without its name.
#define MINFER_OP(NAME, SCHEMA)                                             \
  STABLE_TORCH_LIBRARY_FRAGMENT(minfer, m) { m.def(#NAME SCHEMA); }         \
  MINFER_LIBRARY_IMPL(minfer, MINFER_DEVICE, m) { m.impl(#NAME, TORCH_BOX(&NAME)); }

// The extra step lets MINFER_DEVICE expand before the library macro pastes it.
#define MINFER_LIBRARY_IMPL(NS, DEVICE, M) STABLE_TORCH_LIBRARY_IMPL(NS, DEVICE, M)
